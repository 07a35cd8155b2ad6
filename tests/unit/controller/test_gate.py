"""The staleness bound under any timing. Time is counted in turns of the event loop, so a test is exact and quick."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.controller.gate import Gate, Stopped


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@dataclass
class Run:
    """A producer and a learner around a gate, as the loop has them."""

    gate: Gate
    duration: Callable[[int], int]  # of a group
    learning: Callable[[int], int]  # between two groups of a step
    dropped: Callable[[int], bool] = lambda index: False
    staleness: Callable[[int], int | None] = lambda version: None  # what it is lowered to before the step of `version`
    bounds: dict[int, int] = field(default_factory=dict)  # of a group: the staleness it was admitted under
    admitted: dict[int, int] = field(default_factory=dict)
    consumed: list[list[int]] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    drops: set[int] = field(default_factory=set)

    async def steps(self, count: int) -> None:
        producer = asyncio.create_task(self._produce())
        try:
            for step in range(count):
                await self._learn(step)
        finally:
            producer.cancel()
            await asyncio.gather(producer, *self._tasks, return_exceptions=True)

    async def _learn(self, step: int) -> None:
        groups: list[int] = []
        async for index in self.gate.step():
            groups.append(index)
            self.lags.append(self.gate.version - self.admitted[index])
            await turns(self.learning(step))
        self.consumed.append(groups)
        if (lower := self.staleness(self.gate.version + 1)) is not None:
            self.gate.lower(min(lower, self.gate.max_staleness))
        self.gate.advance(self.gate.version + 1)

    async def _produce(self) -> None:
        while True:
            indices = range(len(self.admitted), len(self.admitted) + self.gate.room)
            self.gate.admit(indices)
            self.admitted |= dict.fromkeys(indices, self.gate.version)
            self.bounds |= dict.fromkeys(indices, self.gate.max_staleness)
            self._tasks += [asyncio.create_task(self._roll(i)) for i in indices]
            await self.gate.changed()

    async def _roll(self, index: int) -> None:
        await turns(self.duration(index))
        if self.dropped(index):
            self.drops.add(index)
            self.gate.drop(index)
        else:
            self.gate.finish(index)

    def __post_init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []


def simulate(run: Run, steps: int) -> Run:
    asyncio.run(asyncio.wait_for(run.steps(steps), 20))
    return run


@settings(max_examples=120, deadline=None)
@given(
    batch=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    durations=st.lists(st.integers(0, 60), min_size=1, max_size=13),
    learning=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    drops=st.sets(st.integers(0, 12)),
    last=st.integers(6, 12),
)
def test_the_bound_holds_under_any_delays(
    batch: int, max_staleness: int, durations: list[int], learning: list[int], drops: set[int], last: int
) -> None:
    """No lag beyond the bound, no deadlock; each admitted group is consumed once, dropped, or reported unfinished. A
    run that ends with these steps leaves nothing unfinished."""
    run = simulate(
        Run(
            Gate(batch, max_staleness, last=last),
            duration=lambda i: durations[i % len(durations)],
            learning=lambda s: learning[s % len(learning)],
            dropped=lambda i: i % 13 in drops and i < 60,
        ),
        steps=6,
    )
    assert max(run.lags) <= max_staleness
    assert [len(groups) for groups in run.consumed] == [batch] * 6
    consumed = [index for groups in run.consumed for index in groups]
    assert sorted([*consumed, *run.drops, *run.gate.unfinished]) == sorted(run.admitted)
    assert len(consumed) + len(run.gate.unfinished) <= last * batch
    if max_staleness == 0:
        assert consumed == sorted(consumed)


@settings(max_examples=120, deadline=None)
@given(
    batch=st.integers(1, 4),
    lowered=st.dictionaries(st.integers(1, 7), st.integers(0, 3)),
    durations=st.lists(st.integers(0, 60), min_size=1, max_size=13),
    learning=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    drops=st.sets(st.integers(0, 12)),
)
def test_a_bound_lowered_on_the_way_holds_for_all_that_start_after(
    batch: int, lowered: dict[int, int], durations: list[int], learning: list[int], drops: set[int]
) -> None:
    """Whenever and by how much it is lowered: every group keeps the bound it was admitted under, and none is stuck."""
    run = simulate(
        Run(
            Gate(batch, 3),
            duration=lambda i: durations[i % len(durations)],
            learning=lambda s: learning[s % len(learning)],
            dropped=lambda i: i % 13 in drops and i < 60,
            staleness=lowered.get,
        ),
        steps=8,
    )
    consumed = [index for groups in run.consumed for index in groups]
    assert [len(groups) for groups in run.consumed] == [batch] * 8
    assert all(lag <= run.bounds[index] for lag, index in zip(run.lags, consumed, strict=True))
    assert sorted([*consumed, *run.drops, *run.gate.unfinished]) == sorted(run.admitted)


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_a_slow_group_holds_nobody_until_it_is_due(max_staleness: int) -> None:
    run = simulate(
        Run(Gate(4, max_staleness), duration=lambda i: 500 if i == 0 else 3, learning=lambda s: 1),
        steps=max_staleness + 2,
    )
    assert [0 in groups for groups in run.consumed] == [False] * max_staleness + [True, False]


def test_sampling_overlaps_learning_only_with_staleness() -> None:
    """While a step waits for its last group, the next batch is admitted or it is not."""

    async def admitted(max_staleness: int) -> int:
        gate = Gate(4, max_staleness)
        gate.admit(range(gate.room))
        gate.finish(0)
        return gate.room

    assert [asyncio.run(admitted(s)) for s in (0, 1, 2)] == [0, 0, 0]
    assert [Gate(4, s).room for s in (0, 1, 2)] == [4, 8, 12]


def test_a_batch_without_staleness_starts_as_a_whole() -> None:
    """A replacement waits until the rest is done, so that it is computed in the same company in every run."""
    gate = Gate(3, 0)
    gate.admit([0, 1, 2])
    gate.drop(1)
    assert gate.room == 0
    gate.finish(2)
    gate.finish(0)
    assert gate.room == 1


def test_stop_ends_a_step_that_waits_but_not_one_that_is_served() -> None:
    async def run() -> list[int]:
        gate, taken = Gate(2, 0), []
        gate.admit([0, 1])
        gate.finish(0)
        gate.stop()
        groups = gate.step()
        taken.append(await anext(groups))
        with pytest.raises(Stopped):
            await anext(groups)
        assert gate.room == 0
        assert gate.unfinished == [1]
        return taken

    assert asyncio.run(run()) == [0]


def test_a_resumed_gate_has_the_room_of_its_version() -> None:
    assert Gate(4, 1, version=7).room == 8
