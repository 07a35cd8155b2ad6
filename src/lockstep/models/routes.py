"""Expert routes on both sides of the loop: recorded beside the KV pages while sampling, replayed while learning.

Shapes: N tokens of a forward, L layers with experts, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lockstep.models.releasable import Releasable
from lockstep.models.routing import Routers


class RouteMemory:
    """Expert ids by KV slot: whoever shares a page (a prefix, a group's prompt, an earlier turn) shares its routes.

    A slot's ids are written by the very forward that writes its keys, or not at all, so they are there whenever the
    keys are and as old as they are; `Recording.write` refuses a forward that passed over a layer.
    """

    def __init__(
        self, routers: Routers, num_slots: int, device: torch.device, memory: Releasable | None = None
    ) -> None:
        """In `memory`, if it is to be given back at times."""
        self.routers = routers
        shape = (routers.num_layers, num_slots, routers.top_k)
        zeros = partial(torch.zeros, device=device) if memory is None else memory.zeros
        self.ids = zeros(*shape, dtype=routers.dtype)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def row(self) -> tuple[int, int]:
        """Shape of one token's ids, (L, k)."""
        return self.routers.num_layers, self.routers.top_k

    @staticmethod
    def slot_bytes(routers: Routers) -> int:
        return routers.num_layers * routers.top_k * routers.dtype.itemsize

    def at(self, slots: Tensor) -> Tensor:
        """A copy, [slots, L, k]."""
        return self.ids.index_select(1, slots).transpose(0, 1).contiguous()

    def read(self, slots: Tensor) -> Readout:
        """The same on its way to the host, while the device goes on: its slots may be written again at once."""
        rows = self.at(slots)
        if self._side is None:
            return Readout(rows)
        host, copied = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True), torch.cuda.Event()
        self._side.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(self._side):
            host.copy_(rows, non_blocking=True)
            rows.record_stream(self._side)
            copied.record(self._side)
        return Readout(host, copied)


@dataclass(frozen=True, slots=True)
class Readout:
    """Routes of a sequence, [rows, L, k] on the host, once they have arrived."""

    ids: Tensor
    copied: torch.cuda.Event | None = None  # None: they are there

    def arrived(self, *, wait: bool) -> bool:
        if self.copied is not None and wait:
            self.copied.synchronize()
        return self.copied is None or self.copied.query()


class Recording:
    """A step of the engine: what its routers choose is written where the step's keys go.

    It all stays on the device and no shape depends on a value, so that a step can become a CUDA graph; one write for
    all layers, because a launch costs more than the few bytes it moves.

    Rows that are computed again after a preemption are `known`: the log-probs of tokens already drawn belong to them.
    """

    def __init__(self, memory: RouteMemory, slots: Tensor, known: tuple[Tensor, Tensor] | None = None) -> None:
        """`known`: places [M] among the N and their ids [M, L, k]."""
        self._memory, self._slots, self._known = memory, slots, known
        self.decides = known is not None
        self._chosen: list[Tensor] = []

    def choose(self, number: int, live: Tensor, scores: Tensor) -> Tensor:
        ids = live
        if self._known is not None:
            places, known = self._known
            ids = live.index_copy(0, places, known[:, number].long())
        self._chosen.append(ids)
        return ids

    def note(self, number: int, ids: Tensor) -> None:
        self._chosen.append(ids)

    def write(self) -> None:
        """After the forward."""
        _require_all(len(self._chosen), self._memory.routers)
        ids = torch.stack(self._chosen).to(self._memory.ids.dtype)
        self._memory.ids.index_copy_(1, self._slots, ids)


class Replay:
    """A forward of the learner: recorded experts where there are, the router's own elsewhere.

    What was chosen is kept, so that activation checkpointing chooses the same when it computes a layer again.
    """

    decides = True

    def __init__(
        self, routers: Routers, ids: Tensor | None = None, known: Tensor | None = None, *, follow: bool = True
    ) -> None:
        """`ids` [N, L, k] where `known` [N]; None: everything is live. Not to `follow` them is only to compare."""
        self._routers, self._ids, self._known, self._follow = routers, ids, known, follow
        self._used: list[Tensor] = []  # [N, k] of each layer
        self._differ: list[Tensor] = []  # [N]

    def choose(self, number: int, live: Tensor, scores: Tensor) -> Tensor:
        if number < len(self._used):  # the layer is computed again
            return self._used[number].long()
        assert number == len(self._used), "layers run in their order"
        used = live.clone()  # so that the graph is the same when it is computed again, from what was kept
        if self._ids is not None and self._known is not None:
            recorded = torch.where(self._known[:, None], self._ids[:, number].long(), live)
            self._differ.append(~same_experts(recorded, live))
            used = recorded if self._follow else used
        self._used.append(used.to(self._routers.dtype))
        return used

    def note(self, number: int, ids: Tensor) -> None:
        raise AssertionError("it decides, so it is asked")

    def outcome(self, spread: Tensor | None) -> Routed:
        """After the forward; `spread` as in `varlen.Shared`."""
        _require_all(len(self._used), self._routers)
        return Routed(self._used, self._differ, spread)


def _require_all(num_asked: int, routers: Routers) -> None:
    if num_asked != routers.num_layers:
        raise RuntimeError(
            f"{num_asked} of {routers.num_layers} routers were asked in this forward: something runs the experts "
            "without them, so that their routes are unknown"
        )


def same_experts(a: Tensor, b: Tensor) -> Tensor:
    """[N] whether two choices [N, k] are the same sets; neither names an expert twice."""
    return (a[:, :, None] == b[:, None]).any(-1).all(-1)


@dataclass(frozen=True, slots=True)
class Routed:
    """The experts a forward ran with, by layer; in full length on demand, because most forwards need neither."""

    _used: list[Tensor]
    _differ: list[Tensor]
    _spread: Tensor | None

    def used(self) -> Tensor:
        """[N, L, k] expert ids."""
        return self._whole(self._used)

    def differ(self) -> Tensor | None:
        """[N, L] where the recorded experts are not those the router would have chosen; None if none are recorded."""
        return self._whole(self._differ) if self._differ else None

    def _whole(self, by_layer: list[Tensor]) -> Tensor:
        stacked = torch.stack(by_layer, 1)
        return stacked if self._spread is None else stacked.index_select(0, self._spread)
