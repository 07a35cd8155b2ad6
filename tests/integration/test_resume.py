"""Runs that are killed, stopped or out of disk, and go on."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import termios
import time
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

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


def test_a_terminal_that_closes_costs_nothing(unbroken: Path, tmp_path: Path) -> None:
    """The live view writes to it until then, and a run that writes to no terminal ends before it saves."""
    recipe = runs.write_recipe(tmp_path)
    ours, its = pty.openpty()
    process = subprocess.Popen(
        runs.command("train", str(recipe), "task.slow=0.1"), cwd=tmp_path, stdin=its, stdout=its, stderr=its,
        start_new_session=True, preexec_fn=_at_a_terminal, text=True,
    )  # fmt: skip
    os.close(its)
    run, closing = tmp_path / "runs/small", Event()
    Thread(target=_read_until, args=(closing, ours), daemon=True).start()
    runs.wait_until(lambda: (run / "checkpoints/step-000001").exists(), process)
    closing.set()
    time.sleep(0.3)
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGHUP)  # as a shell does that ends with its terminal
    assert process.wait(120) == 130
    assert not (run / "checkpoints/step-000006").exists(), "too late to prove anything"
    result = runs.lockstep(tmp_path, "train", "--resume", str(run), "task.slow=0", "--plain")
    assert result.returncode == 0, result.stderr
    assert runs.weights(run, 6) == runs.weights(unbroken, 6)


def test_who_reads_no_more_ends_no_run(tmp_path: Path) -> None:
    """As where Ctrl-C ends `tee` too: what the run says fails from then on, and it saves all the same."""
    ours, its = os.pipe()
    recipe = str(runs.write_recipe(tmp_path))
    process = subprocess.Popen(
        runs.command("train", recipe, "task.slow=0.1", "checkpoint.every=0", "eval.samples=0", "--plain"),
        cwd=tmp_path, stdout=its, stderr=its, text=True,
    )  # fmt: skip
    os.close(its)
    run = tmp_path / "runs/small"
    runs.wait_until(lambda: run.exists() and bool(runs.metrics(run, "reward/mean")), process)
    os.close(ours)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    assert len(list((run / "checkpoints").glob("step-*"))) == 2, "before the first step, and where it stopped"


def _at_a_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup


def _read_until(closing: Event, descriptor: int) -> None:
    while not closing.is_set():
        if select.select([descriptor], [], [], 0.1)[0]:
            os.read(descriptor, 4096)
    os.close(descriptor)


def test_who_is_told_to_ignore_a_hang_up_does(tmp_path: Path) -> None:
    process = subprocess.Popen(
        ["nohup", *runs.command("train", str(runs.write_recipe(tmp_path)), "--plain")], cwd=tmp_path,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    run = tmp_path / "runs/small"
    runs.wait_until(lambda: (run / "checkpoints/step-000001").exists(), process)
    process.send_signal(signal.SIGHUP)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert (run / "checkpoints/step-000006").exists()


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
