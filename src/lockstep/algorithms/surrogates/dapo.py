"""Decoupled clip and dynamic sampling (Yu et al., arXiv:2503.14476, Eq. 8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lockstep.algorithms.clipping import clipped
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class DAPO:
    """−min(r·A, clip(r, 1−ε_low, 1+ε_high)·A);  r = exp(ℓ − ℓp), every token of the update weighs the same."""

    advantage: ClassVar[str] = "grpo"
    reduction: ClassVar[str] = "token_mean"
    dynamic_sampling: ClassVar[bool] = True
    low: float = 0.2
    high: float = 0.28

    def __call__(self, logp: Tensor, batch: Batch) -> Tensor:
        return -clipped(logp, batch, self.low, self.high)
