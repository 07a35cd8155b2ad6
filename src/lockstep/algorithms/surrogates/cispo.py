"""Clipped importance weights (MiniMax, arXiv:2506.13585, Eqs. 4-5): every token keeps a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import PositiveFloat
from torch import Tensor

from lockstep.algorithms.pieces import Companions
from lockstep.algorithms.ratios import prox_ratio
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class CISPO:
    """−sg(min(r, 1+ε_high))·A·ℓ;  r = exp(ℓ − ℓp)."""

    companions: ClassVar[Companions] = Companions(advantage="grpo", reduction="token_mean")
    high: PositiveFloat = 0.28
    """ε_high: r weighs at most 1 + ε_high. The paper states none; this is DAPO's."""

    def __call__(self, logp: Tensor, batch: Batch) -> Tensor:
        r = prox_ratio(logp, batch).clamp(max=1 + self.high)
        return -r.detach() * batch.advantage * logp
