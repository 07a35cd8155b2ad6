"""Rejection by the geometric mean of a sequence's ratios (Liu et al., When Speed Kills Stability, 2025)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from pydantic import PositiveFloat
from torch import Tensor

from lockstep.algorithms.segments import bounded_exp, seq_mean
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class GeoRS:
    """1 if exp seq(ℓp − ℓb) ∈ [1−δ, 1+δ] else 0, for a whole sequence."""

    weighs: ClassVar[bool] = False
    delta: PositiveFloat = 1e-3
    """δ: how far a sequence's mean ratio may be from 1."""

    @property
    def bounds(self) -> tuple[float, float]:
        return 0.0, math.inf

    def __call__(self, batch: Batch) -> Tensor:
        w = bounded_exp(seq_mean(batch.logp_prox - batch.logp_behav, batch))
        return ((w >= 1 - self.delta) & (w <= 1 + self.delta)).to(w.dtype)
