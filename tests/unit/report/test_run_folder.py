from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.config import ConfigError
from lockstep.report.environment import environment, git_commit
from lockstep.report.recorder import RunRecorder
from lockstep.report.run_folder import RunFolder

from .conftest import make_group


def test_a_folder_that_holds_a_run_is_refused_and_resume_is_named(folder: RunFolder) -> None:
    with pytest.raises(ConfigError, match="already holds a run: continue it with --resume"):
        RunFolder.create(folder.root)


def test_what_never_began_leaves_what_was_there_before(tmp_path: Path) -> None:
    (tmp_path / "elsewhere/papers").mkdir(parents=True)
    (tmp_path / "elsewhere/papers/thesis.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    before = sorted(tmp_path.rglob("*"))
    for name in ("new", "empty", "link", "elsewhere"):
        folder = RunFolder.create(tmp_path / name)
        folder.write_config({})
        folder.tensorboard.mkdir()
        folder.remove()
        assert sorted(tmp_path.rglob("*")) == before, name


@pytest.mark.parametrize("line", ["[1]", "{}", '{"step": "3"}', "\0\0"])
def test_a_damaged_log_is_told_and_left_as_it_is(line: str, folder: RunFolder) -> None:
    before = '{"step": 1}\n{"step": 9}\n' + line + "\n"
    folder.events.write_text(before)
    with pytest.raises(ConfigError, match=r"events.jsonl is damaged: line 3"):
        folder.rewind(1)
    assert folder.events.read_text() == before


def test_opening_what_is_no_run_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no run \(no metrics.jsonl\)"):
        RunFolder.open(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder"):
        RunFolder.open(tmp_path / "nowhere")


def test_a_run_stands_for_its_best_checkpoint_else_its_newest(folder: RunFolder) -> None:
    assert folder.result is None
    for step in (999_999, 1_000_000, 3):
        (folder.checkpoints / f"step-{step:06d}").mkdir(parents=True)
    assert folder.result == folder.checkpoints / "step-1000000"
    (folder.checkpoints / "best").symlink_to("step-000003")
    assert folder.result == folder.checkpoints / "best"


def test_a_resumed_history_has_each_step_once(folder: RunFolder) -> None:
    with RunRecorder(folder) as recorder:
        for step in range(1, 7):
            record_step(recorder, step)
    folder.rewind(4)
    with RunRecorder(folder) as recorder:
        for step in range(5, 8):
            record_step(recorder, step)
    for rows in (folder.read_metrics(), folder.read_samples(), folder.read_events()):
        assert [row["step"] for row in rows] == list(range(1, 8))
    times = [row["time"] for row in folder.read_metrics()]
    assert times == sorted(times)


def record_step(recorder: RunRecorder, step: int) -> None:
    recorder.log(step, {"reward/mean": step / 10})
    recorder.samples(step, make_group(step, 1.0))
    recorder.event(step, "note", f"step {step}")


def test_rewinding_keeps_the_warm_up_unless_the_run_starts_over(folder: RunFolder) -> None:
    with RunRecorder(folder) as recorder:
        recorder.log(100, {"warmup/loss": 1.0})
        recorder.log(3, {"reward/mean": 0.5})
    folder.rewind(2)
    assert [row["step"] for row in folder.read_metrics()] == [100]
    folder.rewind(-1)
    assert list(folder.read_metrics()) == []


def test_config_and_environment_round_trip_and_a_resume_keeps_the_id(folder: RunFolder) -> None:
    assert folder.read_config() == {}
    folder.write_config({"task": "arithmetic", "steps": 60})
    assert folder.read_config() == {"task": "arithmetic", "steps": 60}
    folder.write_environment(environment("cpu", ["lockstep", "train", "quickstart"]))
    first = folder.read_environment()
    folder.write_environment(environment("cpu", ["lockstep", "train", "--resume", "runs/x"]))
    second = folder.read_environment()
    assert second["id"] == first["id"]
    assert second["command"] != first["command"]
    assert {"python", "platform", "torch", "transformers", "lockstep", "commit", "device", "cores"} <= second.keys()


def test_outside_of_a_checkout_there_is_no_commit(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None
