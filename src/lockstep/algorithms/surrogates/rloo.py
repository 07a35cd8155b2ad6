"""REINFORCE with a leave-one-out baseline (Ahmadian et al., arXiv:2402.14740)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lockstep.algorithms.pieces import Companions
from lockstep.algorithms.ratios import prox_ratio
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class RLOO:
    """−r·A with ℓp := sg(ℓ);  A = R − mean of the group's other rewards, an answer is one action."""

    companions: ClassVar[Companions] = Companions(advantage="rloo", reduction="seq_mean_token_sum", prox_now=True)

    def __call__(self, logp: Tensor, batch: Batch) -> Tensor:
        return -prox_ratio(logp, batch) * batch.advantage
