"""Importance sampling without a cap: unbiased, and of unbounded variance."""

# ruff: noqa: N999 — a recipe says `correction = "is"`, and the folder is imported by name, never by a statement
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lockstep.algorithms.ratios import mismatch
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class IS:
    """w per token;  w = exp(ℓp − ℓb)."""

    weighs: ClassVar[bool] = True

    @property
    def bounds(self) -> tuple[float, float]:
        return 0.0, math.inf

    def __call__(self, batch: Batch) -> Tensor:
        return mismatch(batch)
