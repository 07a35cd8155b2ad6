"""Rewards normalised over the batch (REINFORCE++, Hu et al., arXiv:2501.03262): a step waits for its last group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import NonNegativeFloat
from torch import Tensor

from lockstep.algorithms.pieces import Episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePP:
    """A = (R − mean) / (std + 1e-6) over all answers of a step, unbiased std; exactly 0 if all rewards are equal."""

    scope: ClassVar[str] = "batch"
    needs_values: ClassVar[bool] = False
    eps: NonNegativeFloat = 1e-6
    """Added to the std."""

    def __call__(self, episodes: Episodes) -> Tensor:
        return episodes.per_token(episodes.normalised(self.eps))
