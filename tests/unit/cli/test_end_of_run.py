"""What `lockstep train` says at the end."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.cli import training
from lockstep.controller.checkpoints import Progress
from lockstep.report.recorder import RunRecorder
from lockstep.report.run_folder import RunFolder


def test_it_fits_into_a_terminal_of_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RunRecorder(RunFolder.create(Path("runs/quickstart"))) as recorder:
        recorder.log(0, {"eval/accuracy": 0.168})
        recorder.log(60, {"eval/accuracy": 1.0, "control/accuracy": 0.176})
    done = Progress(step=60, version=60, next_index=0, unfinished=[])
    monkeypatch.setattr(training, "run_training", lambda *_, **__: done)
    console = Console(file=io.StringIO(), width=80)
    training.train("quickstart", [], resume=None, dry_run=False, plain=True, runs=Path("runs"), console=console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[:2] == [
        "done: 60 steps",
        "  accuracy    16.8% -> 100.0% held out (supervised learning alone: 17.6%)",
    ]
    assert max(map(len, lines)) <= 80


def test_one_evaluation_is_not_told_as_two(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    with RunRecorder(folder) as recorder:
        recorder.log(6, {"eval/accuracy": 0.5})
    assert training._accuracy(folder) == "50.0% held out, at step 6"


def test_answers_that_nobody_judged_are_told(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    with RunRecorder(folder) as recorder:
        recorder.log(0, {"eval/failed": 32.0})
        assert training._accuracy(folder) == ""
        recorder.log(6, {"eval/accuracy": 1.0, "eval/failed": 26.0})
    assert training._accuracy(folder) == "100.0% held out, at step 6, of those that could be judged (in the end not 26)"
