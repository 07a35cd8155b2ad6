"""Decoupled clip and dynamic sampling (Yu et al., arXiv:2503.14476, Eq. 8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import PositiveFloat
from torch import Tensor

from lockstep.algorithms.clipping import clipped
from lockstep.algorithms.pieces import Companions
from lockstep.algorithms.ratios import prox_ratio
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class DAPO:
    """−min(r·A, clip(r, 1−ε_low, 1+ε_high)·A);  r = exp(ℓ − ℓp), every token of the update weighs the same."""

    companions: ClassVar[Companions] = Companions(advantage="grpo", reduction="token_mean", dynamic_sampling=True)
    low: PositiveFloat = 0.2
    """ε_low: below 1 − ε_low a token with A < 0 has no gradient."""
    high: PositiveFloat = 0.28
    """ε_high: above 1 + ε_high a token with A > 0 has no gradient."""

    def __call__(self, logp: Tensor, batch: Batch) -> Tensor:
        r, A = prox_ratio(logp, batch), batch.advantage
        return -clipped(r, A, self.low, self.high)
