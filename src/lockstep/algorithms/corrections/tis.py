"""Truncated importance sampling (Yao et al., On the Rollout-Training Mismatch in Modern RL Systems)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lockstep.algorithms.segments import bounded_exp
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class TIS:
    """min(w, C) per token;  w = exp(ℓp − ℓb)."""

    cap: float = 2.0

    def __call__(self, batch: Batch) -> Tensor:
        return bounded_exp(batch.logp_prox - batch.logp_behav).clamp(max=self.cap)
