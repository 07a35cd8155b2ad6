"""Several corrections as one: `correction = ["tis", "veto"]`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from lockstep.algorithms.pieces import Correction
from lockstep.types import Batch


@dataclass(frozen=True, slots=True)
class Product:
    """Π of the parts: the weight of the one that weighs, on what all of them accept."""

    parts: tuple[Correction, ...]

    @property
    def bounds(self) -> tuple[float, float]:
        """Those of the one that weighs."""
        lows, highs = zip(*(part.bounds for part in self.parts), strict=True)
        return max(lows), min(highs)

    def __call__(self, batch: Batch) -> Tensor:
        first, *rest = (part(batch) for part in self.parts)
        return math.prod(rest, start=first)
