"""Supervised learning on worked examples: a warm-up for models that cannot answer yet, and RL's control."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from pydantic import Field

from lockstep.config import Config
from lockstep.data.supervised import Demonstrations
from lockstep.learner.local import LocalLearner
from lockstep.protocols import Recorder

RAMP = 20  # updates over which the learning rate rises


class WarmupConfig(Config):
    """Supervised learning on the task's demonstrations before RL."""

    steps: int = Field(default=200, ge=1)
    """optimiser updates"""
    batch_size: int = Field(default=64, ge=1)
    """demonstrations per update"""
    learning_rate: float = Field(default=1e-3, gt=0)
    """constant after a short rise"""
    control: bool = False
    """after RL, also train supervised alone for as long as RL took, and report what that reached"""


class Supervised:
    """Updates on demonstrations, in an order that depends on the seed alone."""

    def __init__(self, learner: LocalLearner, demonstrations: Demonstrations, config: WarmupConfig) -> None:
        self._learner = learner
        self._demonstrations = demonstrations
        self._config = config
        self._step = 0

    async def run(self, steps: int, recorder: Recorder) -> None:
        """The warm-up."""
        while self._step < steps:
            recorder.log(self._step + 1, await self._update())

    async def run_for(self, seconds: float, on_update: Callable[[float], None]) -> None:
        """The control: goes on where the warm-up ended, for as long as RL took; tells the seconds gone."""
        started = time.monotonic()
        while (gone := time.monotonic() - started) < seconds:
            on_update(gone)
            await self._update()
        on_update(seconds)

    def skip(self, steps: int) -> None:
        """The control does not see again what the warm-up has seen."""
        self._step = steps

    async def _update(self) -> dict[str, float]:
        batch = self._demonstrations.batch(self._step)
        examples = [
            (torch.tensor(tokens), torch.tensor(mask)) for tokens, mask in zip(batch.tokens, batch.mask, strict=True)
        ]
        self._step += 1
        rate = self._config.learning_rate * min(1.0, self._step / RAMP)
        return await self._learner.supervised(examples, rate)
