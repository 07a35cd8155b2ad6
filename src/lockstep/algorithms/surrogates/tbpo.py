"""Trust band policy optimisation (QaRL: Gu et al., Sec. 3.2, the objective after Eq. 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import PositiveFloat
from torch import Tensor

from lockstep.algorithms.pieces import Companions
from lockstep.algorithms.ratios import seq_ratio
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class TBPO:
    """−s̃·A;  s = exp(seq(ℓ − ℓp)), s̃ = clip(s, 0, 1+ε_h) for A ≥ 0, clip(s, 1−δ_l, 1+δ_h) for A < 0.

    Outside its band a response has no gradient, whichever way A pushes: it is dropped.
    """

    companions: ClassVar[Companions] = Companions(
        advantage="grpo", reduction="seq_mean", correction="geo_tis_band", ratio=seq_ratio
    )
    high: PositiveFloat = 4e-4
    """ε_h: above 1 + ε_h a response with A ≥ 0 is dropped."""
    neg_low: PositiveFloat = 3e-4
    """δ_l: below 1 − δ_l a response with A < 0 is dropped."""
    neg_high: PositiveFloat = 7e-4
    """δ_h: above 1 + δ_h a response with A < 0 is dropped."""

    def __call__(self, logp: Tensor, batch: Batch) -> Tensor:
        s, A = seq_ratio(logp, batch), batch.advantage
        positive = s.clamp(0, 1 + self.high)
        negative = s.clamp(1 - self.neg_low, 1 + self.neg_high)
        return -torch.where(A < 0, negative, positive) * A
