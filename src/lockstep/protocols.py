"""The roles and what each promises. In one process these are plain objects; on a cluster, deployments of the same.

No role holds another: roles meet on the bus (groups) and in the weight store (versions of weights).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lockstep.types import (
    Completion,
    Group,
    GroupReceipt,
    Operator,
    Request,
    Sample,
    StepResult,
    Verdict,
)

if TYPE_CHECKING:
    from torch import Tensor


class Engine(Protocol):
    """Samples tokens. Every call may come from any task; none blocks the event loop."""

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        """Yields completions as they finish, in any order. Closing the iterator aborts what is left.

        Fails with ValueError, before any work, on a request that cannot fit the context or the memory.
        """
        ...

    async def abort(self, uids: Sequence[str]) -> None:
        """Ends these requests now; each still yields what it has, with stop reason `aborted`."""
        ...

    async def update_weights(self, version: int) -> None:
        """Takes `version` from the weight store, between two steps, by the engine's update policy."""
        ...

    async def operators(self, names: Sequence[str] | None = None) -> Mapping[str, Operator]:
        """What the weights of these names, or all, run in now."""
        ...

    async def sleep(self) -> None:
        """Gives its memory on the device up to others. What was asked for before goes on after `wake`; until then
        requests fail. Called again, it does nothing. RuntimeError if it was not started to do so."""
        ...

    async def wake(self) -> None:
        """Takes its memory back. Weights of its own are gone: the next `update_weights` brings them, and answers go on
        from then. RuntimeError, and it sleeps on, if the device has too little memory left."""
        ...

    async def reset_cache(self) -> None:
        """Forgets cached prefixes, so that what ran before leaves no trace in the arithmetic."""
        ...

    async def stats(self) -> Mapping[str, float]:
        """Counters since the last call: tokens, steps, preemptions, prefix hits, busy seconds."""
        ...

    async def close(self) -> None: ...


class Rollout(Protocol):
    """Turns one sample into one complete, judged group on the bus."""

    async def run(self, index: int, sample: Sample, version: int) -> GroupReceipt:
        """Waits for the engine and the reward; cancelling it aborts the requests. Fails only on engine errors."""
        ...


Approve = Callable[[Mapping[str, float]], bool]  # from what was measured of a step: may its weights move?


class Learner(Protocol):
    async def step(self, step: int, groups: AsyncIterator[int], approve: Approve = ...) -> StepResult:
        """One training step: pulls groups from the bus as their indices arrive, updates, publishes a version.

        Waits for `groups` to end, then asks `approve` once, with the metrics that are known before the weights move;
        by default everything is approved. A step that is not, or in which everything was rejected, publishes the old
        weights again.
        """
        ...

    async def set_correction(self, name: str) -> None:
        """Takes the place of the recipe's correction from the next step on. A checkpoint does not hold it.

        Fails with ConfigError, changing nothing, if there is none of that name or the surrogate refuses it.
        """
        ...

    async def set_learning_rate(self, rate: float) -> None:
        """Takes the place of the recipe's, the top of the schedule, from the next step on. As above, not saved."""
        ...

    async def operators(self, names: Sequence[str] | None = None) -> Mapping[str, Operator]:
        """What the learner's forward runs these weights, or all, in, with the digest of what it publishes for them."""
        ...

    async def save(self, folder: Path) -> None:
        """Writes weights, optimiser and counters into `folder`, which the caller makes visible atomically."""
        ...

    async def close(self) -> None: ...


class Bus(Protocol):
    """Holds complete groups between those who make them and those who learn from them."""

    async def put(self, group: Group) -> None: ...

    async def get(self, index: int) -> Group:
        """Takes the group off the bus."""
        ...

    async def drop(self, index: int) -> None: ...


class WeightStore(Protocol):
    """Versions of weights, by name. `get` may hand out the very tensors that were put: readers copy, never write."""

    def put(self, version: int, weights: Mapping[str, Tensor]) -> None: ...

    def get(self, version: int) -> Mapping[str, Tensor]:
        """Raises LookupError naming the versions that are still held."""
        ...


class Task(Protocol):
    """A dataset with its reward. `split` is "train" or "eval"."""

    def samples(self, split: str) -> Sequence[Sample]:
        """All samples of a split; a procedural one may be made lazily, item by item, from the seed."""
        ...

    def demonstrations(self) -> Sequence[Sample]:
        """Samples with `solution` set, for supervised warm-up; empty if the task has none."""
        ...

    def reward(self, sample: Sample, answer: str) -> Verdict: ...


class Judge(Protocol):
    """A reward made safe to call from the event loop: bounded in time, and a failure is a Verdict that says so."""

    async def __call__(self, sample: Sample, answer: str) -> Verdict:
        """Waits for a free worker, then for the reward, at most its time limit. Never raises for a bad reward."""
        ...

    async def close(self) -> None: ...


IDLE = "idle"  # the kind of events that tell why steps moved no weight
GOVERNOR = "governor"  # the kind of its events; their text is "rule: what it did; the metrics it looked at"


class Recorder(Protocol):
    """Where a run writes what happened. Never blocks for long; a full disk raises OSError with the path."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def samples(self, step: int, group: Group) -> None:
        """Keeps the answers of a group with their rewards and reasons."""
        ...

    def event(self, step: int, kind: str, text: str) -> None:
        """Something a reader of the run should know: a checkpoint, a skip, an alarm."""
        ...
