"""Group sequence policy optimisation (Zheng et al., arXiv:2507.18071, Eqs. 5 and 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import PositiveFloat
from torch import Tensor

from lockstep.algorithms.clipping import clipped
from lockstep.algorithms.pieces import Companions
from lockstep.algorithms.ratios import seq_ratio
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class GSPO:
    """−min(s·A, clip(s, 1−ε_low, 1+ε_high)·A);  s = exp(seq(ℓ − ℓp)), one ratio for a whole response."""

    companions: ClassVar[Companions] = Companions(advantage="grpo", reduction="seq_mean", ratio=seq_ratio)
    low: PositiveFloat = 3e-4
    """ε_low: below 1 − ε_low a response with A < 0 has no gradient."""
    high: PositiveFloat = 4e-4
    """ε_high: above 1 + ε_high a response with A > 0 has no gradient."""

    def __call__(self, logp: Tensor, batch: Batch) -> Tensor:
        s, A = seq_ratio(logp, batch), batch.advantage
        return -clipped(s, A, self.low, self.high)
