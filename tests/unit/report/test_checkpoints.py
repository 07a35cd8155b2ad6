from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.report.checkpoints import Checkpoints


def save(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        with checkpoints.writing(step) as partial:
            (partial / "model.safetensors").write_text(str(step))


def test_a_checkpoint_is_listed_only_once_it_is_whole(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.latest is None
    with checkpoints.writing(40) as partial:
        (partial / "model.safetensors").write_text("w")
        assert checkpoints.steps() == []
    assert checkpoints.steps() == [40]
    assert (tmp_path / "checkpoints/step-000040/model.safetensors").read_text() == "w"


def test_a_save_that_fails_leaves_nothing_and_loses_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    with pytest.raises(OSError, match="disk full"), checkpoints.writing(2) as partial:
        save_half(partial)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    with pytest.raises(FileExistsError, match="a step is saved once"), checkpoints.writing(1):
        pass


def test_pruning_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1, 2, 3, 4)
    checkpoints.mark_best(3)
    checkpoints.mark_best(1)
    assert checkpoints.best == 1
    assert (tmp_path / "best" / "model.safetensors").read_text() == "1"
    assert checkpoints.prune(keep=1) == [2, 3]
    assert checkpoints.steps() == [1, 4]
    assert checkpoints.latest == 4


def test_sweeping_removes_what_a_kill_left(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    (tmp_path / ".step-000002.partial").mkdir()
    checkpoints.sweep()
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def save_half(partial: Path) -> None:
    (partial / "half").write_text("h")
    raise OSError("disk full")
