"""Sums over a constant: length does not change a token's weight (Dr.GRPO, Liu et al., arXiv:2503.20783)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor

from lockstep.algorithms.segments import seq_count
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSumNorm:
    """Σ m·x / (B·horizon)"""

    horizon: Annotated[int, Field(ge=1, le=10**9)] = 1024
    """What a sequence counts, however long it is: usually the longest answer."""
    count_rejected: bool = True
    """Whether what a correction rejected stays in the denominator."""

    def __call__(self, batch: Batch, counted: Tensor) -> tuple[Tensor, Tensor]:
        return counted.float(), (seq_count(counted, batch) > 0).sum() * self.horizon
