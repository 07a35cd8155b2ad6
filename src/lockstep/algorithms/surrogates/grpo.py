"""Group relative policy optimisation (Shao et al., arXiv:2402.03300, Eq. 3 without its KL term)."""

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
class GRPO:
    """−min(r·A, clip(r, 1−ε, 1+ε)·A);  r = exp(ℓ − ℓp), A normalised in the group, mean over each response first."""

    companions: ClassVar[Companions] = Companions(advantage="grpo", reduction="seq_mean")
    eps: PositiveFloat = 0.2
    """ε: how far r may move from 1 before the gradient stops."""

    def __call__(self, logp: Tensor, batch: Batch) -> Tensor:
        r, A = prox_ratio(logp, batch), batch.advantage
        return -clipped(r, A, self.eps, self.eps)
