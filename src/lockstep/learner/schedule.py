"""The learning rate over a run, as a pure function of the update number: a resume needs no state for it."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from lockstep.config import Config


class Schedule(Config):
    """Rises linearly over the warm-up, then keeps or decays the learning rate."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up: stays, or falls to `floor` in a line or half a cosine wave."""
    warmup: int = Field(default=0, ge=0)
    """Optimiser updates until the full learning rate."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """What the decay ends at, as a share of the learning rate."""

    def factor(self, update: int, num_updates: int) -> float:
        """What multiplies the learning rate in update 0, 1, … of a run of `num_updates`; never 0 before its end."""
        if update < self.warmup:
            return (update + 1) / self.warmup
        progress = min(1.0, (update - self.warmup) / max(1, num_updates - self.warmup))
        remaining = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
        return self.floor + (1 - self.floor) * remaining[self.kind]
