"""Decoupled clip and dynamic sampling (Yu et al., arXiv:2503.14476, Eq. 8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lockstep.algorithms.segments import bounded_exp
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
        r, A = bounded_exp(logp - batch.logp_prox), batch.advantage
        return -torch.min(r * A, r.clamp(1 - self.low, 1 + self.high) * A)
