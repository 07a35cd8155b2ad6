"""The learner's state in one file: whole tensors, so that a run may resume on another number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lockstep.config import ConfigError
from lockstep.learner.ranks import Ranks
from lockstep.learner.updates import Updater

FILE = "learner.pt"
SHOWN = 3  # differences named when a state does not fit


def save_state(folder: Path, updater: Updater, ranks: Ranks) -> None:
    """All ranks must call it: shards are gathered; rank 0 writes. OSError with the path if the disk is full."""
    state = map_tensors(updater.state_dict(), _whole)
    if ranks.rank == 0:
        _write(folder / FILE, state)


def _write(path: Path, state: Any) -> None:
    """Through a file of Python's, which tells what the system said; torch's own error, over it, does not."""
    try:
        with path.open("wb") as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error


def load_state(folder: Path, updater: Updater) -> None:
    """Bit for bit what was saved; ConfigError, and nothing loaded, if it does not fit."""
    state = _read(folder / FILE, updater.ranks.device)
    if wrong := updater.misfits(state):
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise ConfigError(f"cannot go on from {str(folder)!r}: {'; '.join(wrong[:SHOWN])}{more}")
    masters = dict(updater.masters.named_parameters())
    weights = state["masters"]["weights"]
    state["masters"]["weights"] = {name: _like(weights[name], master) for name, master in masters.items()}
    owners = [p for group in updater.optimiser.param_groups for p in group["params"]]
    state["optimiser"]["state"] = {
        index: map_tensors(moments, lambda t, owner=owners[index]: _like(t, owner))
        for index, moments in state["optimiser"]["state"].items()
    }
    updater.load_state_dict(state)


def read_masters(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The float32 weights of a checkpoint and their update scale, on the CPU and only read from disk when used.

    Without a learner's state there are none, and no scale.
    """
    if not (folder / FILE).is_file():
        return {}, {"factor": 1.0, "by": "weights"}
    state = _read(folder / FILE, torch.device("cpu"), mmap=True)
    return state["masters"]["weights"], state["update_scale"]


def _read(path: Path, device: torch.device, *, mmap: bool = False) -> dict[str, Any]:
    try:
        return torch.load(path, map_location=device, weights_only=True, mmap=mmap)
    except Exception as error:  # a damaged file surfaces as almost anything
        raise ConfigError(f"{path} is damaged; remove that checkpoint to go on from the one before") from error


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nested dicts and lists with every tensor changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(value, change) for key, value in tree.items()}
    return [map_tensors(value, change) for value in tree] if isinstance(tree, list) else tree


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(tensor: Tensor, owner: Tensor) -> Tensor:
    """Sharded as its parameter is; a counter of the optimiser stays whole."""
    if isinstance(owner, DTensor) and tensor.shape == owner.shape:
        return distribute_tensor(tensor, owner.device_mesh, owner.placements)
    return tensor
