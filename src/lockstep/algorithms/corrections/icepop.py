"""Tokens on which sampler and learner disagree too much do not learn (IcePop, Ling Team, 2025)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from lockstep.algorithms.ratios import mismatch
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class IcePop:
    """w if α ≤ w ≤ β else 0, per token;  w = exp(ℓp − ℓb)."""

    weighs: ClassVar[bool] = True
    low: NonNegativeFloat = 0.5
    """α: the smallest weight that is accepted."""
    high: PositiveFloat = 5.0
    """β: the largest."""

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low = {self.low:g} is above high = {self.high:g}: every token would be rejected")

    @property
    def bounds(self) -> tuple[float, float]:
        return 0.0, math.inf

    def __call__(self, batch: Batch) -> Tensor:
        w = mismatch(batch)
        return torch.where((w >= self.low) & (w <= self.high), w, 0.0)
