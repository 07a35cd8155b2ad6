"""TBPO's mismatch weight w̃ (QaRL: Gu et al., Eq. 5, which omits the exp)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from lockstep.algorithms.segments import bounded_exp, seq_mean
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class GeoTisBand:
    """exp(clip(seq(ℓp − ℓb), −log c, log c)), one weight for a sequence, in [1/c, c]."""

    weighs: ClassVar[bool] = True
    cap: Annotated[float, Field(ge=1)] = 2.0
    """c: the largest weight; the smallest is 1/c."""

    @property
    def bounds(self) -> tuple[float, float]:
        return 1 / self.cap, self.cap

    def __call__(self, batch: Batch) -> Tensor:
        w = bounded_exp(seq_mean(batch.logp_prox - batch.logp_behav, batch))
        return w.clamp(*self.bounds)  # after exp: the same weight, and exactly at a bound where it is truncated
