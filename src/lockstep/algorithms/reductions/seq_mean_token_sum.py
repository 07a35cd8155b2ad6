"""The mean over sequences of their sums: a long sequence weighs by its length."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lockstep.algorithms.segments import seq_count
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqMeanTokenSum:
    """Σ m·x / number of sequences with a token"""

    count_rejected: bool = True
    """Whether what a correction rejected stays in the denominator."""

    def __call__(self, batch: Batch, counted: Tensor) -> tuple[Tensor, Tensor]:
        return counted.float(), (seq_count(counted, batch) > 0).sum()
