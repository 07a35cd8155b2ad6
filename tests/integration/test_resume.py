"""Runs that are killed, stopped or out of disk, and go on."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import command_runs as runs
import pytest


def test_a_run_learns_and_leaves_a_checkpoint_and_a_report(unbroken: Path) -> None:
    rewards = runs.metrics(unbroken, "reward/mean")
    assert list(rewards) == [1, 2, 3, 4, 5, 6]
    assert rewards[6] > rewards[1]
    assert max(runs.metrics(unbroken, "mismatch/k3").values()) < 1e-6
    assert (unbroken / "report.html").stat().st_size > 10_000
    assert (unbroken / "checkpoints/best/tokenizer.json").exists()


def test_killed_at_any_moment_it_resumes_bit_for_bit(unbroken: Path, tmp_path: Path) -> None:
    process = runs.start(tmp_path, "train", str(runs.write_recipe(tmp_path)), "--plain")
    run = tmp_path / "runs/small"
    runs.wait_until(lambda: (run / "checkpoints/step-000002").exists(), process)
    process.kill()  # SIGKILL
    process.wait()
    assert not (run / "checkpoints/step-000006").exists(), "too late to prove anything"
    result = runs.lockstep(tmp_path, "train", "--resume", str(run), "--plain")
    assert result.returncode == 0, result.stderr
    assert runs.weights(run, 6) == runs.weights(unbroken, 6)
    assert runs.metrics(run, "reward/mean") == runs.metrics(unbroken, "reward/mean")


def test_interrupt_saves_and_the_run_goes_on(unbroken: Path, tmp_path: Path) -> None:
    process = runs.start(tmp_path, "train", str(runs.write_recipe(tmp_path)), "--plain")
    run = tmp_path / "runs/small"
    runs.wait_until(lambda: (run / "checkpoints/step-000001").exists(), process)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 130, output
    assert "--resume" in output
    result = runs.lockstep(tmp_path, "train", "--resume", str(run), "--plain")
    assert result.returncode == 0, result.stderr
    assert runs.weights(run, 6) == runs.weights(unbroken, 6)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ended_in_the_warm_up_it_says_so(sent: signal.Signals, tmp_path: Path) -> None:
    process = runs.start(tmp_path, "train", str(runs.write_recipe(tmp_path)), "warmup.steps=1000000", "--plain")
    metrics = tmp_path / "runs/small/metrics.jsonl"
    runs.wait_until(lambda: metrics.exists() and "warmup/" in metrics.read_text(), process)
    process.send_signal(sent)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 130, output
    assert output.splitlines()[-1] == "stopped; what was saved before is whole"


def test_terminated_twice_it_says_so_and_goes_on_from_what_was_saved(unbroken: Path, tmp_path: Path) -> None:
    process = runs.start(tmp_path, "train", str(runs.write_recipe(tmp_path)), "task.slow=0.3", "--plain")
    run = tmp_path / "runs/small"
    runs.wait_until(lambda: (run / "checkpoints/step-000001").exists(), process)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 130, output
    assert "stopped" in output.splitlines()[-1]
    result = runs.lockstep(tmp_path, "train", "--resume", str(run), "task.slow=0", "--plain")
    assert result.returncode == 0, result.stderr
    assert runs.weights(run, 6) == runs.weights(unbroken, 6)


def test_sampling_ahead_keeps_the_staleness_bound_and_resumes(tmp_path: Path) -> None:
    recipe = str(runs.write_recipe(tmp_path))
    process = runs.start(tmp_path, "train", recipe, "train.max_staleness=2", "train.steps=8", "--plain")
    run = tmp_path / "runs/small"
    runs.wait_until(lambda: (run / "checkpoints/step-000003").exists(), process)
    process.kill()
    process.wait()
    result = runs.lockstep(tmp_path, "train", "--resume", str(run), "--plain")
    assert result.returncode == 0, result.stderr
    assert set(runs.metrics(run, "reward/mean")) == set(range(1, 9))
    assert max(runs.metrics(run, "rollout/lag_max").values()) <= 2


def test_answers_of_every_step_are_kept_with_their_reasons(unbroken: Path) -> None:
    rows = [json.loads(line) for line in (unbroken / "samples.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {1, 2, 3, 4, 5, 6}
    assert all("printable" in row["reasons"][0] for row in rows)
