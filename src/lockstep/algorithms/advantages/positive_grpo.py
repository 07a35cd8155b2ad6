"""GRPO's advantages without the negative ones, an ablation of QaRL (Gu et al., Sec. 4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import NonNegativeFloat
from torch import Tensor

from lockstep.algorithms.pieces import Episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class PositiveGRPO:
    """max(A, 0), A = (R − mean) / (std + 1e-6) in the group. Dropped answers still count in the denominator."""

    scope: ClassVar[str] = "group"
    needs_values: ClassVar[bool] = False
    eps: NonNegativeFloat = 1e-6
    """Added to the std."""

    def __call__(self, episodes: Episodes) -> Tensor:
        return episodes.per_token(episodes.normalised(self.eps).clamp(min=0))
