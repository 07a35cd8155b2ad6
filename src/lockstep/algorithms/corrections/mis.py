"""Masked importance sampling (Liu et al., When Speed Kills Stability, 2025)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from lockstep.algorithms.segments import bounded_exp, seq_total
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class MIS:
    """exp Σ(ℓp − ℓb)·m, one weight for a sequence; 0, which rejects it, if that is above `high` or below `low`."""

    weighs: ClassVar[bool] = True
    high: PositiveFloat = 2.0
    """The largest weight that is accepted."""
    low: NonNegativeFloat = 0.0
    """The smallest one. Above 0 it rejects almost every long answer."""

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low = {self.low:g} is above high = {self.high:g}: every sequence would be rejected")

    @property
    def bounds(self) -> tuple[float, float]:
        return 0.0, math.inf

    def __call__(self, batch: Batch) -> Tensor:
        w = bounded_exp(seq_total(batch.logp_prox - batch.logp_behav, batch))
        return torch.where((w >= self.low) & (w <= self.high), w, 0.0)
