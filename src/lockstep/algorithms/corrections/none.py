"""No correction: the sampler is taken for the learner."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class NONE:
    """1"""

    weighs: ClassVar[bool] = False

    @property
    def bounds(self) -> tuple[float, float]:
        return 0.0, math.inf

    def __call__(self, batch: Batch) -> Tensor:
        return torch.ones_like(batch.logp_prox)
