"""The expert routes of sequences on their way through the engine: beside their pages, kept over a preemption, read out
when they end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.models.routes import Readout, Recording, RouteMemory
from lockstep.rollout.scheduler import Plan
from lockstep.rollout.sequence import Sequence
from lockstep.rollout.transfer import send
from lockstep.types import Routes


@dataclass(frozen=True, slots=True)
class Kept:
    """What a preempted sequence takes along, so that its tokens keep the experts they were drawn with."""

    ids: Tensor  # [rows, L, k] on the device
    versions: list[int]  # of the weights that computed each row

    def then(self, later: Kept) -> Kept:
        """With the rows of `later` that these do not reach: it was preempted again before it had caught up."""
        num = len(self.versions)
        return Kept(torch.cat([self.ids, later.ids[num:]]), self.versions + later.versions[num:])


class Recorder:
    def __init__(self, memory: RouteMemory, page_size: int) -> None:
        self.memory, self.page_size = memory, page_size
        self._kept: dict[Sequence, Kept] = {}
        self._leaving: list[tuple[Sequence, Tensor, list[int]]] = []  # slots and versions of those who just ended
        self._ended: dict[Sequence, tuple[Readout, slice, list[int]]] = {}

    def recording(self, plan: Plan, slots: Tensor) -> Recording:
        """Of one step. Rows that the same weights have computed before are told what they chose then."""
        places: list[int] = []
        known: list[Tensor] = []
        first = 0  # place of a chunk among the step's tokens
        for chunk in plan.chunks:
            if kept := self._kept.get(chunk.seq):
                end = min(chunk.end, len(kept.versions))
                rows = [row for row in range(chunk.start, end) if kept.versions[row] == plan.version]
                places += [first + row - chunk.start for row in rows]
                known.append(kept.ids[send(rows, slots.device)])
            first += chunk.end - chunk.start
        if not places:
            return Recording(self.memory, slots)
        return Recording(self.memory, slots, (send(places, slots.device), torch.cat(known)))

    def leaving(self, seq: Sequence) -> None:
        """Its pages are about to be given up: for good if it has a reason to stop, else until it is prefilled again."""
        if seq.stop_reason is None:
            kept = Kept(self.memory.at(send(self._slots(seq, 0), self.memory.ids.device)), seq.computed_by)
            self._kept[seq] = kept.then(self._kept[seq]) if seq in self._kept else kept
        else:
            first = seq.request.num_routed
            self._leaving.append((seq, self._slots(seq, first), seq.computed_by[first:]))

    def read_out(self) -> None:
        """Sends the routes of all who ended with the last step to the host, in one copy; before the next one writes."""
        if not self._leaving:
            return
        slots = torch.cat([slots for _, slots, _ in self._leaving])
        readout, first = self.memory.read(send(slots, self.memory.ids.device)), 0
        for seq, slots, versions in self._leaving:
            self._ended[seq] = (readout, slice(first, first + len(slots)), versions)
            first += len(slots)
        self._leaving.clear()

    def _slots(self, seq: Sequence, first: int) -> Tensor:
        """Where the rows from `first` on are, on the host."""
        pages = torch.tensor(seq.pages, dtype=torch.int64)
        slots = pages[:, None] * self.page_size + torch.arange(self.page_size)
        return slots.flatten()[first : seq.num_computed]

    def arrived(self, seq: Sequence, *, wait: bool) -> bool:
        """Whether the routes of a sequence that ended are on the host."""
        return seq not in self._ended or self._ended[seq][0].arrived(wait=wait)

    def take(self, seq: Sequence) -> Routes:
        """Once, when they have arrived: a row for every token but the last; what was never computed is marked lost."""
        kept, first = self._kept.pop(seq, None), seq.request.num_routed
        if seq in self._ended:
            readout, rows, versions = self._ended.pop(seq)
            found = Kept(readout.ids[rows], versions)
        elif kept is not None:  # ended while it waited to be prefilled again
            found = Kept(kept.ids[first:].cpu(), kept.versions[first:])
        else:
            found = Kept(self.memory.ids.new_zeros(0, *self.memory.row, device="cpu"), [])
        num_lost = len(seq.tokens) - 1 - first - len(found.versions)
        lost = Kept(found.ids.new_zeros(num_lost, *self.memory.row), [-1] * num_lost)
        return Routes(torch.cat([found.ids, lost.ids]), torch.tensor(found.versions + lost.versions, dtype=torch.int32))
