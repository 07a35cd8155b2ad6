"""The policy gradient itself (Williams, Machine Learning 8, 1992)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lockstep.algorithms.pieces import Companions
from lockstep.algorithms.ratios import prox_ratio
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinforce:
    """−r·A with ℓp := sg(ℓ), so r = 1 and its gradient is −A·∇ℓ; the group's mean is the baseline."""

    companions: ClassVar[Companions] = Companions(advantage="dr_grpo", reduction="seq_mean_token_sum", prox_now=True)

    def __call__(self, logp: Tensor, batch: Batch) -> Tensor:
        return -prox_ratio(logp, batch) * batch.advantage
