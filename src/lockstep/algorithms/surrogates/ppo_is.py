"""PPO-IS, a baseline that fails under low-bit sampling (Yao et al., On the Rollout-Training Mismatch, Eq. 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import PositiveFloat
from torch import Tensor

from lockstep.algorithms.clipping import clipped
from lockstep.algorithms.pieces import Companions
from lockstep.algorithms.ratios import behav_ratio
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoIs:
    """−min(r'·A, clip(r', 1−ε, 1+ε)·A);  r' = exp(ℓ − ℓb): the clip takes the mismatch for a step too far."""

    companions: ClassVar[Companions] = Companions(
        advantage="gae", reduction="token_mean", correction="none", holds_weight=True, ratio=behav_ratio
    )
    eps: PositiveFloat = 0.2
    """ε: how far r' may move from 1 before the gradient stops."""

    def __call__(self, logp: Tensor, batch: Batch) -> Tensor:
        r, A = behav_ratio(logp, batch), batch.advantage
        return -clipped(r, A, self.eps, self.eps)
