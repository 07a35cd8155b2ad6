"""Rewards normalised within the group (Shao et al., arXiv:2402.03300, Sec. 4.1.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import NonNegativeFloat
from torch import Tensor

from lockstep.algorithms.pieces import Episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPO:
    """A = (R − mean) / (std + 1e-6), unbiased std; exactly 0 for equal rewards and for a group of one."""

    scope: ClassVar[str] = "group"
    needs_values: ClassVar[bool] = False
    eps: NonNegativeFloat = 1e-6
    """Added to the std."""

    def __call__(self, episodes: Episodes) -> Tensor:
        return episodes.per_token(episodes.normalised(self.eps))
