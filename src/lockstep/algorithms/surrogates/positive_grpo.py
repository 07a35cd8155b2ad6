"""GRPO on good answers only, an ablation of QaRL (Gu et al., Sec. 4.2, 'Positive GRPO')."""

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
class PositiveGRPO:
    """−min(r·A, clip(r, 1−ε, 1+ε)·A);  r = exp(ℓ − ℓp), A < 0 dropped after the group was normalised."""

    companions: ClassVar[Companions] = Companions(advantage="positive_grpo", reduction="seq_mean")
    eps: PositiveFloat = 0.2
    """ε: how far r may move from 1 before the gradient stops."""

    def __call__(self, logp: Tensor, batch: Batch) -> Tensor:
        r, A = prox_ratio(logp, batch), batch.advantage
        return -clipped(r, A, self.eps, self.eps)
