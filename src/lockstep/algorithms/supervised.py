"""Imitation, as one more objective: the mean cross-entropy of the tokens to learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lockstep.algorithms.corrections.none import NONE
from lockstep.algorithms.objective import Objective
from lockstep.algorithms.pieces import Companions
from lockstep.algorithms.reductions.token_mean import TokenMean
from lockstep.types import Batch


@dataclass(frozen=True, slots=True)
class NegativeLogLikelihood:
    """−ℓ"""

    companions: ClassVar[Companions] = Companions(advantage="none", reduction="token_mean", correction="none")

    def __call__(self, logp: Tensor, batch: Batch) -> Tensor:
        return -logp


CROSS_ENTROPY = Objective(surrogate=NegativeLogLikelihood(), correction=NONE(), reduction=TokenMean())
