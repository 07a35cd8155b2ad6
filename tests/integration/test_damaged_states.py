"""Damage to a checkpoint's master weights is noticed by all who read them, and an export is whole or not there."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import command_runs as runs
import pytest
import torch

from lockstep.assembly.recipe import Recipe
from lockstep.assembly.run import train
from lockstep.cli import BAD_INPUT
from lockstep.config import load
from lockstep.models import export

LOW_BIT = ["rollout.precision=fp8_w8a8", "device=cpu", "eval.samples=0"]
UP = "model.layers.0.mlp.up_proj.weight"
Command = Callable[..., tuple[int, str, list[str]]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged")
    train(load(Recipe, runs.write_recipe(folder), ["train.steps=1", *LOW_BIT]), folder / "run", plain=True)
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))


def change(run: Path, how: Callable[[dict[str, Any]], object]) -> None:
    path = run / "checkpoints/step-000001/learner.pt"
    state = torch.load(path, weights_only=True)
    how(state)
    torch.save(state, path)


READERS = {
    "resume": ("train", "--resume", "run", "train.steps=2", "--plain"),
    "export": ("export", "run", "out"),
    "audit": ("audit", "run"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_changed_byte(reader: str, run: Path, command: Command) -> None:
    path = run / "checkpoints/step-000001/learner.pt"
    weight = torch.load(path, weights_only=True)["masters"]["weights"][UP]
    content = bytearray(path.read_bytes())
    content[content.index(weight.numpy().tobytes()) + 3] ^= 64
    path.write_bytes(content)
    code, _, errors = command(*READERS[reader])
    assert (code, len(errors)) == (BAD_INPUT, 1)
    assert "learner.pt is damaged; " in errors[0]
    assert not Path("out").exists()


@pytest.mark.parametrize("reader", READERS)
def test_a_missing_part(reader: str, run: Path, command: Command) -> None:
    change(run, lambda state: state.pop("update_scale"))
    code, _, errors = command(*READERS[reader])
    assert (code, len(errors)) == (BAD_INPUT, 1)
    assert "learner.pt is damaged; " in errors[0]


@pytest.mark.parametrize("reader", READERS)
def test_a_master_that_is_not_finite(reader: str, run: Path, command: Command) -> None:
    change(run, lambda state: state["masters"]["weights"][UP].view(-1)[7].fill_(torch.nan))
    code, _, errors = command(*READERS[reader])
    assert (code != 0, len(errors)) == (True, 1)
    assert UP in errors[0]


@pytest.mark.parametrize("reader", READERS)
def test_a_missing_master(reader: str, run: Path, command: Command) -> None:
    change(run, lambda state: state["masters"]["weights"].pop(UP))
    code, _, errors = command(*READERS[reader])
    assert (code, len(errors)) == (BAD_INPUT, 1)
    assert UP in errors[0]


def test_what_a_full_disk_leaves_of_an_export_is_nothing(run: Path, command: Command, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(export, "save_torch_state_dict", full)
        code, _, errors = command("export", "run", "out")
    assert (code != 0, len(errors)) == (True, 1)
    assert "out: No space left on device" in errors[0]
    assert [path.name for path in Path().iterdir()] == ["run"]
    assert command("export", "run", "out")[0] == 0


def test_the_format_is_the_checkpoint_s_own(run: Path, command: Command) -> None:
    """Whatever the run has been resumed with since."""
    assert command("train", "--resume", "run", "rollout.precision=int8_w8a8", "train.steps=2", "--plain")[0] == 0
    for step, name in ((1, "fp8_w8a8"), (2, "int8_w8a8")):
        code, said, _ = command("export", f"run/checkpoints/step-{step:06d}", f"out{step}")
        assert (code, f"weights in {name}, made from" in said) == (0, True)
    (run / "checkpoints/best").unlink(missing_ok=True)
    (run / "checkpoints/best").symlink_to("step-000001")
    code, said, _ = command("audit", "run")
    assert (code, "step-000001, sampled from in fp8_w8a8" in said) == (0, True)
    assert json.loads((run / "config.json").read_text())["rollout"]["precision"] == "int8_w8a8"
    shutil.rmtree(run / "checkpoints/step-000002")
    code, _, errors = command("export", "run/checkpoints/step-000001", "out3", "--precision", "fp8_w8a8:block")
    assert code == BAD_INPUT
    assert "the option 'block' has no value" in errors[0]
