"""How far sampling may run ahead of learning, and which groups a step consumes.

lag = learner version − version a group was admitted at. Admission counts work in flight: a group starts only while
fewer than (version + s + 1) · batch groups were admitted, s = max_staleness, and none that no step is left for. A group
admitted at version a is due by step a + s. A step takes whatever is ready, earliest due first, as long as those still
being sampled all keep a place before they are due; otherwise it waits for them.

Why that bounds the lag: let n(d) be the groups not yet consumed that are due by step d, and c(d) the places from now to
step d. Always n(d) ≤ c(d): taking a group due later is refused where it would break this (`_leaves_room`), taking one
due by d lowers both sides by one, and an admission raises n(d) only for d ≥ version + s, where it stays within c(d)
because all groups ever admitted then number at most (version + s + 1) · batch, no more than all places up to step d.
So it holds whatever the delays, and nothing is dropped for being late.

`lower` changes s on the way. Groups admitted before keep the step they are due by, and the argument above never looks
at an older s: it holds for every admission with the s of that moment.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field


class Stopped(Exception):  # noqa: N818 - not an error
    """The run was asked to stop while a step still waited for groups."""


@dataclass(slots=True)
class Gate:
    batch: int
    max_staleness: int
    version: int = 0
    last: int = sys.maxsize  # the version a run ends with: nothing is sampled that no step is left for
    _admitted: int = 0  # groups admitted, less those dropped
    _in_flight: dict[int, int] = field(default_factory=dict)  # index -> step it is due by
    _ready: dict[int, int] = field(default_factory=dict)  # the same, in order of completion
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _stopped: bool = False

    def __post_init__(self) -> None:
        self._admitted = self.version * self.batch  # a resumed run has consumed this many

    @property
    def room(self) -> int:
        """How many groups may start now. Without staleness a batch starts as a whole, so that it is repeatable."""
        if self._stopped or (self.max_staleness == 0 and self._in_flight):
            return 0
        return max(0, min(self.version + self.max_staleness + 1, self.last) * self.batch - self._admitted)

    def admit(self, indices: Sequence[int]) -> None:
        assert len(indices) <= self.room, f"{len(indices)} groups admitted, room for {self.room}"
        self._admitted += len(indices)
        self._in_flight |= dict.fromkeys(indices, self.version + self.max_staleness)

    def finish(self, index: int) -> None:
        self._ready[index] = self._in_flight.pop(index)
        self._changed.set()

    def drop(self, index: int) -> None:
        """The group carries nothing to learn: its place is free again."""
        del self._in_flight[index]
        self._admitted -= 1
        self._changed.set()

    def advance(self, version: int) -> None:
        self.version = version
        self._changed.set()

    def lower(self, max_staleness: int) -> None:
        """Groups admitted from now on run at most this far ahead; until those before are consumed none may start."""
        assert 0 <= max_staleness <= self.max_staleness
        self.max_staleness = max_staleness

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def stopped(self) -> bool:
        return self._stopped

    def stop(self) -> None:
        """Ends the wait of a step under way; nothing more is admitted."""
        self._stopped = True
        self._changed.set()

    async def changed(self) -> None:
        """waits for: a group that finished or was dropped, a new version, or the stop"""
        await self._changed.wait()
        self._changed.clear()

    @property
    def unfinished(self) -> list[int]:
        """Groups admitted and not consumed, which a resumed run generates again."""
        return sorted([*self._in_flight, *self._ready])

    async def step(self) -> AsyncIterator[int]:
        """The groups of the step that starts now, as they become ready.

        consumes: ready groups · waits for: those in flight · unblocked by: finish, drop, stop
        """
        for taken in range(self.batch):
            while (index := self._next(self.batch - taken)) is None:
                if self._stopped:
                    raise Stopped
                await self.changed()
            del self._ready[index]
            yield index

    def _next(self, places: int) -> int | None:
        if self.max_staleness == 0:  # in order of prompts: the arithmetic of a step then never depends on timing
            first = _earliest(self._in_flight | self._ready)
            return first if first in self._ready else None
        first = _earliest(self._ready)
        return first if first is not None and self._leaves_room(self._ready[first], places) else None

    def _leaves_room(self, due: int, places: int) -> bool:
        """Whether groups in flight that are due before `due` still fit if one due by then is taken now."""
        sooner = sorted(other for other in self._in_flight.values() if other < due)
        return all(
            number < places + (other - self.version) * self.batch for number, other in enumerate(sooner, start=1)
        )


def _earliest(dues: Mapping[int, int]) -> int | None:
    """The index that is due first; of several the lowest."""
    return min(dues, key=lambda index: (dues[index], index), default=None)
