"""Proximal policy optimisation (Schulman et al., arXiv:1707.06347, Eq. 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lockstep.algorithms.clipping import clipped
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class PPO:
    """−min(r·A, clip(r, 1−ε, 1+ε)·A);  r = exp(ℓ − ℓp), A from GAE with a value head."""

    advantage: ClassVar[str] = "gae"
    reduction: ClassVar[str] = "token_mean"
    dynamic_sampling: ClassVar[bool] = False
    eps: float = 0.2

    def __call__(self, logp: Tensor, batch: Batch) -> Tensor:
        return -clipped(logp, batch, self.eps, self.eps)
