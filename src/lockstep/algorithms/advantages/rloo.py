"""Rewards against the others of the group (Kool et al., 2019; Ahmadian et al., arXiv:2402.14740)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lockstep.algorithms.pieces import Episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class RLOO:
    """A_i = R_i − Σ_{j≠i} R_j / (G − 1); exactly 0 for equal rewards and for a group of one."""

    scope: ClassVar[str] = "group"
    needs_values: ClassVar[bool] = False

    def __call__(self, episodes: Episodes) -> Tensor:
        R = episodes.rewards
        if episodes.all_equal:
            return torch.zeros(len(episodes.seq))
        others = (R.sum() - R) / (len(R) - 1)
        return episodes.per_token(R - others)
