"""The learner's state in one file: whole tensors, so that a run may resume on another number of ranks."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lockstep.config import ConfigError
from lockstep.learner.ranks import Ranks
from lockstep.learner.updates import Updater

FILE = "learner.pt"
PARTS = frozenset({"masters", "optimiser", "update", "update_scale", "sampled_in", "first_load"})
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


class Masters(NamedTuple):
    """The float32 weights of a checkpoint, by name, and their update scale."""

    weights: dict[str, Tensor]
    update_scale: dict[str, Any]


def load_state(folder: Path, updater: Updater) -> None:
    """Bit for bit what was saved; ConfigError, and nothing loaded, if it does not fit or is damaged."""
    _check(folder / FILE)
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


def read_masters(folder: Path) -> Masters | None:
    """On the CPU, and only kept in memory when used; None if the checkpoint has no learner's state."""
    if not (folder / FILE).is_file():
        return None
    _check(folder / FILE)
    state = _read(folder / FILE, torch.device("cpu"), mmap=True)
    return Masters(state["masters"]["weights"], state["update_scale"])


def sampled_in(folder: Path) -> str | dict[str, Any] | None:
    """The precision that a checkpoint was sampled from in, as a recipe would say it; None: high. Reads no weights.

    FileNotFoundError if it has no learner's state, which alone knows.
    """
    if not (folder / FILE).is_file():
        raise FileNotFoundError(folder / FILE)
    return _read(folder / FILE, torch.device("cpu"), mmap=True)["sampled_in"]


def _check(path: Path) -> None:
    """Holds every byte against the file's checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except Exception as error:  # as below
        raise _damaged(path) from error
    if broken is not None:
        raise _damaged(path)


def _read(path: Path, device: torch.device, *, mmap: bool = False) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location=device, weights_only=True, mmap=mmap)
    except Exception as error:  # a damaged file surfaces as almost anything
        raise _damaged(path) from error
    if not isinstance(state, dict) or not state.keys() >= PARTS:
        raise _damaged(path)
    return state


def _damaged(path: Path) -> ConfigError:
    return ConfigError(f"{path} is damaged; remove that checkpoint to go on from the one before")


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
