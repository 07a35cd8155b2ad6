"""Truncated importance sampling of whole sequences (Liu et al., When Speed Kills Stability, 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import PositiveFloat
from torch import Tensor

from lockstep.algorithms.segments import bounded_exp, seq_total
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqTIS:
    """min(exp Σ(ℓp − ℓb)·m, C), one weight for a sequence."""

    weighs: ClassVar[bool] = True
    cap: PositiveFloat = 2.0
    """C: the largest weight."""

    @property
    def bounds(self) -> tuple[float, float]:
        return 0.0, self.cap

    def __call__(self, batch: Batch) -> Tensor:
        return bounded_exp(seq_total(batch.logp_prox - batch.logp_behav, batch)).clamp(max=self.cap)
