"""A disk that fills up while a checkpoint is written: an OSError that names the place, and nothing old is harmed.

The system is asked to refuse files beyond a size, which it does in the middle of a write, as a full disk would.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from making import make_core, make_groups, make_module, run_step

from lockstep.controller.checkpoints import Checkpoints, Progress
from lockstep.learner.checkpoint import FILE
from lockstep.models.loading import Loaded, ModelConfig, load, save
from lockstep.models.tiny import byte_tokenizer

DAPO = {"surrogate": "dapo"}


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond `num_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_learner_s_state_names_its_file_wherever_the_room_ends(tmp_path: Path) -> None:
    core = make_core(DAPO)
    run_step(core, make_groups())
    core.save(tmp_path)
    size = (tmp_path / FILE).stat().st_size
    for room in (1, size // 100, size // 2, size - 1):
        with room_for(room), pytest.raises(OSError, match="File too large") as refusal:
            core.save(tmp_path)
        assert refusal.value.filename == str(tmp_path / FILE)
    with room_for(size):
        core.save(tmp_path)


@pytest.mark.parametrize("num_weights", [1, None], ids=["tokenizer", "weights"])
def test_the_model_s_files_name_their_folder(tmp_path: Path, num_weights: int | None) -> None:
    """Both are written by libraries in Rust, which know no OSError; with few weights the tokenizer's is the largest."""
    loaded = Loaded.of(make_module(), byte_tokenizer())
    weights = dict(list(loaded.module.state_dict().items())[-1:] if num_weights else loaded.module.state_dict())
    save(tmp_path, loaded, weights)
    largest = max(path.stat().st_size for path in tmp_path.iterdir())
    with room_for(largest - 1), pytest.raises(OSError, match="File too large") as refusal:
        save(tmp_path, loaded, weights)
    assert refusal.value.filename == str(tmp_path)


def test_errors_that_are_not_the_disk_s_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Loaded.of(make_module(), byte_tokenizer())

    def fail(*args: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(type(loaded.tokenizer), "save_pretrained", fail)
    with pytest.raises(TypeError, match="a bug"):
        save(tmp_path, loaded, loaded.module.state_dict())


def test_the_checkpoint_before_stays_whole_and_the_next_one_is_written(tmp_path: Path) -> None:
    core, checkpoints = make_core(DAPO), Checkpoints(tmp_path, keep=1)
    loaded = Loaded.of(core.updater.module, byte_tokenizer())

    async def write(folder: Path) -> None:
        core.save(folder)
        save(folder, loaded, core.weights())

    def checkpoint(step: int) -> Path:
        progress = Progress(step=step, version=step, next_index=0, unfinished=[])
        return asyncio.run(checkpoints.save(progress, write, best=True))

    first, before = checkpoint(1), {name: tensor.clone() for name, tensor in core.weights().items()}
    run_step(core, make_groups())
    with room_for(10_000), pytest.raises(OSError, match="File too large"):
        checkpoint(2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["best", "step-000001"]
    again = make_core(DAPO, seed=7)
    again.load(first)
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.weights().items())
    module = load(ModelConfig(path=str(first)), dtype=torch.float32, device=torch.device("cpu"), seed=0).module
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in before.items())
    assert checkpoint(2).name == "step-000002"
