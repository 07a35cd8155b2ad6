from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep.config import ConfigError
from lockstep.protocols import Recorder
from lockstep.report import recorder as module
from lockstep.report.recorder import RecorderConfig, Recorders, RunRecorder
from lockstep.report.run_folder import RunFolder

from .conftest import make_group


def test_metrics_reach_the_log_and_tensorboard(folder: RunFolder) -> None:
    with RunRecorder(folder) as recorder:
        recorder.log(1, {"reward/mean": 0.25, "policy/loss": math.nan})
        recorder.log(2, {"reward/mean": 0.5})
    first, second = folder.read_metrics()
    assert (first["step"], first["reward/mean"], second["reward/mean"]) == (1, 0.25, 0.5)
    assert math.isnan(float(first["policy/loss"]))
    assert 0 <= first["time"] <= second["time"] < 60 < first["wall"]
    board = EventAccumulator(str(folder.tensorboard)).Reload()
    assert [(e.step, e.value) for e in board.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


def test_an_answer_keeps_its_reward_reasons_and_lengths(folder: RunFolder) -> None:
    with RunRecorder(folder) as recorder:
        recorder.samples(7, make_group(17, 1.0, None))
    good, failed = folder.read_samples()
    assert good["prompt"] == [{"role": "user", "content": "What is 6 * 7?"}]
    assert (good["uid"], good["reward"], good["reasons"]) == ("17/0", 1.0, ["correct: 42 equals 42"])
    assert (good["stop_reason"], good["num_tokens"], good["num_prompt_tokens"]) == ("eos", 4, 2)
    assert good["flaws"] == ["repetition"]
    assert failed["reward"] is None


def test_samples_per_step_are_capped_but_failures_have_their_own_room(folder: RunFolder) -> None:
    with RunRecorder(folder, RecorderConfig(samples_per_step=1)) as recorder:
        for step in (1, 2):
            for index in range(3):
                recorder.samples(step, make_group(10 * step + index, 1.0))  # flawed, but no worse than its group
                recorder.samples(step, make_group(10 * step + index + 5, None))
    assert [row["group"] for row in folder.read_samples()] == [10, 15, 20, 25]


def test_wandb_is_refused_in_one_line_when_missing(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        RunRecorder(folder, RecorderConfig(wandb=True))


def test_wandb_continues_under_the_run_folders_id(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(
        define_metric=lambda *a, **k: None, log=lambda row: calls.append(row), finish=lambda: calls.append("finish")
    )
    fake = SimpleNamespace(init=lambda **k: calls.append((k["id"], k["name"])) or run)
    monkeypatch.setattr(module, "find_spec", lambda _: object())
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    folder.write_environment({"id": "abc"})
    with RunRecorder(folder, RecorderConfig(wandb=True)) as recorder:
        recorder.log(1, {"reward/mean": 0.5})
    assert calls == [("abc", "run"), {"reward/mean": 0.5, "step": 1}, "finish"]


def test_a_mirror_that_cannot_be_written_ends_nothing(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with RunRecorder(folder) as recorder:
        monkeypatch.setattr(module.TensorBoardSink, "log", full)
        monkeypatch.setattr(module.TensorBoardSink, "close", full)
        for step in (1, 2):
            recorder.log(step, {"reward/mean": 0.5})
    assert [row["step"] for row in folder.read_metrics()] == [1, 2]
    assert [row["text"][:31] for row in folder.read_events()] == ["TensorBoard shows no more steps"]


class Memory:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def log(self, step: int, metrics: Any) -> None:
        self.calls.append((step, metrics))

    def samples(self, step: int, group: Any) -> None:
        self.calls.append((step, group.index))

    def event(self, step: int, kind: str, text: str) -> None:
        self.calls.append((step, kind, text))


def test_recorders_fan_out() -> None:
    memories = [Memory(), Memory()]
    both: Recorder = Recorders(memories)
    both.log(1, {"a": 1.0})
    both.samples(1, make_group(4, 1.0))
    both.event(1, "checkpoint", "saved")
    assert memories[0].calls == memories[1].calls == [(1, {"a": 1.0}), (1, 4), (1, "checkpoint", "saved")]
