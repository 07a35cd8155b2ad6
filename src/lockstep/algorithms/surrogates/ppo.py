"""Proximal policy optimisation (Schulman et al., arXiv:1707.06347, Eq. 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lockstep.algorithms.segments import bounded_exp
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class PPO:
    """−min(r·A, clip(r, 1−ε, 1+ε)·A);  r = exp(ℓ − ℓp), A from GAE with a value head."""

    advantage: ClassVar[str] = "gae"
    reduction: ClassVar[str] = "token_mean"
    dynamic_sampling: ClassVar[bool] = False
    eps: float = 0.2

    def __call__(self, logp: Tensor, batch: Batch) -> Tensor:
        r, A = bounded_exp(logp - batch.logp_prox), batch.advantage
        return -torch.min(r * A, r.clamp(1 - self.eps, 1 + self.eps) * A)
