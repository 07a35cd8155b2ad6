"""Several ranks as one learner: rank 0 is the front, the others do what it says until it says stop.

Every rank gets all groups (numbers, not activations: they are small next to a forward) and so makes the same plan
without talking; what is exchanged is what only one rank knows: gradients, sums and proximal log-probs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.data.packing import Row, blank, pack

IDLE = timedelta(
    days=7
)  # how long followers wait for a command: rollout may take long, a dead front is noticed at once
STUCK = timedelta(minutes=10)  # how long a rank waits for the others inside a step before it fails
STOP = "stop"


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among the ranks; for a learner on its own every exchange is free."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @staticmethod
    def current(device: torch.device) -> Ranks:
        """As torch.distributed was initialised; see `join`."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return Ranks(device)
        return Ranks(device, dist.get_rank(), dist.get_world_size())

    def sum(self, x: Tensor) -> Tensor:
        return self._reduce(x, dist.ReduceOp.SUM)

    def max(self, x: Tensor) -> Tensor:
        return self._reduce(x, dist.ReduceOp.MAX)

    def _reduce(self, x: Tensor, op: Any) -> Tensor:
        if self.world > 1:
            x = x.clone()
            dist.all_reduce(x, op)
        return x

    def merge(self, mine: dict[int, Any]) -> dict[int, Any]:
        """All ranks' entries."""
        if self.world == 1:
            return mine
        everyone: list[dict[int, Any] | None] = [None] * self.world
        dist.all_gather_object(everyone, mine)
        return {key: value for part in everyone if part is not None for key, value in part.items()}

    def from_front(self, value: Any = None) -> Any:
        """Rank 0's value, on every rank."""
        if self.world == 1:
            return value
        told = [value]
        dist.broadcast_object_list(told, src=0)
        return told[0]

    def share(self, rows: Sequence[Row], budget: int) -> list[list[Row]]:
        """This rank's micro-batches of `rows`; every rank gets the same number, blank ones where it has no work."""
        packed = [pack(part, budget) for part in balance(rows, self.world)]
        mine, depth = packed[self.rank], max(map(len, packed))
        return mine + [[blank(rows[0])]] * (depth - len(mine))


def join(device: torch.device, timeout: timedelta = STUCK) -> Ranks:
    """Joins the ranks that `torchrun` started; a process started alone stays alone and pays for nothing.

    A GPU becomes the process's current device and is bound to the group: what asks for "cuda" without a number, as
    NCCL and kernels do, would otherwise take the first GPU on every rank.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device)
        else:
            dist.init_process_group("gloo", timeout=timeout)
    return Ranks.current(device)


def leave() -> None:
    """Ends what `join` began, after the front's `stop`; a process that is alone has nothing to leave."""
    if dist.is_initialized():
        dist.destroy_process_group()


def balance(rows: Sequence[Row], parts: int) -> list[list[Row]]:
    """Longest first to whoever has the fewest tokens; the order within a part is the order of `rows`."""
    if parts == 1:
        return [list(rows)]
    loads, owner = [0] * parts, [0] * len(rows)
    for i in sorted(range(len(rows)), key=lambda i: -len(rows[i])):
        owner[i] = loads.index(min(loads))
        loads[owner[i]] += len(rows[i])
    return [[row for row, o in zip(rows, owner, strict=True) if o == part] for part in range(parts)]


class Front:
    """Rank 0's hand on all ranks: `call` runs a method of the core everywhere and returns its own result."""

    def __init__(self, core: object) -> None:
        self.core = core
        self._group = _command_group() if dist.is_initialized() and dist.get_world_size() > 1 else None

    def call(self, method: str, *args: Any) -> Any:
        """Blocks until this rank is done; fails if another rank fails, when the process group's timeout ends."""
        self._tell(method, args)
        return getattr(self.core, method)(*args)

    def stop(self) -> None:
        self._tell(STOP, ())

    def _tell(self, method: str, args: tuple[Any, ...]) -> None:
        if self._group is not None:
            dist.broadcast_object_list([(method, args)], src=0, group=self._group)


def serve(core: object) -> None:
    """What every rank but the front runs: the front's calls on its own core, until told to stop."""
    group = _command_group()
    while True:
        command: list[Any] = [None]
        dist.broadcast_object_list(command, src=0, group=group)
        method, args = command[0]
        if method == STOP:
            return
        getattr(core, method)(*args)


def _command_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=IDLE)
    assert isinstance(group, dist.ProcessGroup)
    return group
