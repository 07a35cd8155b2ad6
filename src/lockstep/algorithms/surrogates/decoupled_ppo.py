"""Decoupled PPO (Hilton et al., arXiv:2110.00641): the policy that sampled is not the one the clip stays close to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import PositiveFloat
from torch import Tensor

from lockstep.algorithms.clipping import clipped
from lockstep.algorithms.pieces import Companions
from lockstep.algorithms.ratios import mismatch, prox_ratio
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoupledPPO:
    """−w·min(r·A, clip(r, 1−ε, 1+ε)·A);  r = exp(ℓ − ℓp), w = exp(ℓp − ℓb) without a cap, ℓb of any older version."""

    companions: ClassVar[Companions] = Companions(
        advantage="gae", reduction="token_mean", correction="none", holds_weight=True
    )
    eps: PositiveFloat = 0.2
    """ε: how far r may move from 1 before the gradient stops."""

    def __call__(self, logp: Tensor, batch: Batch) -> Tensor:
        r, A, w = prox_ratio(logp, batch), batch.advantage, mismatch(batch)
        return -w * clipped(r, A, self.eps, self.eps)
