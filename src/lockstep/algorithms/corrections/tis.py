"""Truncated importance sampling (Yao et al., On the Rollout-Training Mismatch in Modern RL Systems, Sec. 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import PositiveFloat
from torch import Tensor

from lockstep.algorithms.ratios import mismatch
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class TIS:
    """min(w, C) per token;  w = exp(ℓp − ℓb)."""

    weighs: ClassVar[bool] = True
    cap: PositiveFloat = 2.0
    """C: the largest weight."""

    @property
    def bounds(self) -> tuple[float, float]:
        return 0.0, self.cap

    def __call__(self, batch: Batch) -> Tensor:
        return mismatch(batch).clamp(max=self.cap)
