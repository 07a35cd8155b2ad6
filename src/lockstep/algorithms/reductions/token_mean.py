"""Every token of the optimiser update weighs the same (DAPO prints it per prompt group; ours is over the update)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMean:
    """Σ m·x / Σ m"""

    count_rejected: bool = True
    """Whether what a correction rejected stays in the denominator."""

    def __call__(self, batch: Batch, counted: Tensor) -> tuple[Tensor, Tensor]:
        m = counted.float()
        return m, m.sum()
