"""GRPO done right (Liu et al., arXiv:2503.20783): no division by the group's spread, none by a response's length."""

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
class DrGRPO:
    """−min(r·A, clip(r, 1−ε, 1+ε)·A);  r = exp(ℓ − ℓp), A = R − mean of the group, tokens summed over a constant."""

    companions: ClassVar[Companions] = Companions(advantage="dr_grpo", reduction="token_sum_norm")
    eps: PositiveFloat = 0.2
    """ε: how far r may move from 1 before the gradient stops."""

    def __call__(self, logp: Tensor, batch: Batch) -> Tensor:
        r, A = prox_ratio(logp, batch), batch.advantage
        return -clipped(r, A, self.eps, self.eps)
