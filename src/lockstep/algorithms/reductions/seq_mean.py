"""Every sequence weighs the same, however long (GRPO)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lockstep.algorithms.segments import seq_count
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqMean:
    """Σ_seq (Σ m·x / L) / number of sequences with a token"""

    count_rejected: bool = True
    """Whether what a correction rejected stays in the denominator."""

    def __call__(self, batch: Batch, counted: Tensor) -> tuple[Tensor, Tensor]:
        L = seq_count(counted, batch)
        return counted / L.clamp(min=1)[batch.seq], (L > 0).sum()
