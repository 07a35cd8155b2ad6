"""Rewards against the group's mean, without its spread (Liu et al., arXiv:2503.20783)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lockstep.algorithms.pieces import Episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class DrGRPO:
    """A = R − mean; exactly 0 for equal rewards and for a group of one."""

    scope: ClassVar[str] = "group"
    needs_values: ClassVar[bool] = False

    def __call__(self, episodes: Episodes) -> Tensor:
        R = episodes.rewards
        if episodes.all_equal:
            return torch.zeros(len(episodes.seq))
        return episodes.per_token(R - R.mean())
