"""One token that the learner would never sample rejects its sequence (Liu et al., When Speed Kills Stability, 2025)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from lockstep.algorithms.ratios import mismatch
from lockstep.algorithms.segments import seq_total
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Veto:
    """0 if any token of the sequence has w < low else 1;  w = exp(ℓp − ℓb)."""

    weighs: ClassVar[bool] = False
    low: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    """The weight below which a token is a veto."""

    @property
    def bounds(self) -> tuple[float, float]:
        return 0.0, math.inf

    def __call__(self, batch: Batch) -> Tensor:
        w = mismatch(batch)
        return (seq_total((w < self.low).to(w.dtype), batch) == 0).to(w.dtype)
