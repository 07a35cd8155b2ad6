"""Rewards normalised over the batch (REINFORCE++, Hu et al., arXiv:2501.03262): a step waits for its last group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
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
        R = episodes.rewards
        if episodes.all_equal:
            return torch.zeros(len(episodes.seq))
        return episodes.per_token((R - R.mean()) / (R.std(correction=1) + self.eps))
