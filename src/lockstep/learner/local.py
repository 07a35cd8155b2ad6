"""The learner of one process (or the front of several ranks): the core, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.learner.ranks import Front
from lockstep.learner.step import LearnerCore
from lockstep.protocols import Approve, Bus, WeightStore
from lockstep.types import Group, Operator, StepResult

OnGroup = Callable[[int, Group], None]
SaveWeights = Callable[[Path, Mapping[str, Tensor]], None]


class LocalLearner:
    """Implements `protocols.Learner`. All work runs in one thread of its own, in the order it was asked for."""

    def __init__(
        self,
        core: LearnerCore,
        bus: Bus,
        store: WeightStore,
        *,
        save_weights: SaveWeights,
        on_group: OnGroup = lambda step, group: None,
        version: int = 0,
    ) -> None:
        """`version` is the one a checkpoint ended with. `save_weights` writes a Hugging Face checkpoint.

        `on_group` sees every group that is learned from, with the number of the step (the first is 1).
        """
        self._front, self._bus, self._store = Front(core), bus, store
        self._save_weights, self._on_group = save_weights, on_group
        self.version = version
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")

    async def step(self, step: int, groups: AsyncIterator[int], approve: Approve = lambda measured: True) -> StepResult:
        """consumes: groups off the bus · waits for: `groups` to end · unblocked by: rollouts finishing"""
        await self._run(self._front.call, "begin", self.version)
        async for index in groups:
            group = await self._bus.get(index)
            self._on_group(step + 1, group)
            await self._run(self._front.call, "accumulate", [group])
        approved = approve(await self._run(self._front.call, "measure"))
        metrics = await self._run(self._front.call, "finish", not approved)
        await self.publish(self.version + 1)
        return StepResult(version=self.version, metrics=metrics)

    async def set_correction(self, name: str) -> None:
        await self._run(self._front.call, "set_correction", name)

    async def set_learning_rate(self, rate: float) -> None:
        await self._run(self._front.call, "set_learning_rate", rate)

    async def publish(self, version: int) -> None:
        """Puts the weights into the store as `version`: the live tensors, which the store copies if it must."""
        await self._run(self._store.put, version, await self._run(self._front.call, "published"))
        self.version = version

    async def operators(self, names: Sequence[str] | None = None) -> Mapping[str, Operator]:
        return await self._run(self._front.call, "operators", names)

    async def supervised(self, examples: list[tuple[Tensor, Tensor]], learning_rate: float) -> dict[str, float]:
        """One update of the supervised warm-up."""
        return await self._run(self._front.call, "supervised", examples, learning_rate)

    async def forget(self) -> None:
        """A fresh optimiser, between warm-up and training."""
        await self._run(self._front.call, "forget")

    async def save(self, folder: Path) -> None:
        await self._run(self._front.call, "save", folder)
        await self.save_model(folder)

    async def save_model(self, folder: Path) -> None:
        """The Hugging Face checkpoint alone."""
        weights = await self._run(self._front.call, "checkpoint")
        await self._run(self._save_weights, folder, weights)

    async def load_reference(self, path: str) -> None:
        """The checkpoint a KL term is to."""
        await self._run(self._front.call, "load_reference", path)

    async def load(self, folder: Path) -> None:
        await self._run(self._front.call, "load", folder)

    async def close(self) -> None:
        await self._run(self._front.stop)
        self._thread.shutdown()

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
