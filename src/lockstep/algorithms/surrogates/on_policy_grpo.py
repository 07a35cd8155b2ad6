"""GRPO with a single update per batch, an ablation of QaRL (Gu et al., Sec. 4.2, 'On-policy GRPO')."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lockstep.algorithms.pieces import Companions
from lockstep.algorithms.ratios import prox_ratio
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPolicyGRPO:
    """−r·A;  r = exp(ℓ − ℓp) = 1 in the one update a step makes, so that there is nothing to clip."""

    companions: ClassVar[Companions] = Companions(advantage="grpo", reduction="seq_mean", one_update=True)

    def __call__(self, logp: Tensor, batch: Batch) -> Tensor:
        return -prox_ratio(logp, batch) * batch.advantage
