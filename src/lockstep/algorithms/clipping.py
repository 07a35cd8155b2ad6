"""The clipped objective of PPO and of what descends from it."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.algorithms.segments import bounded_exp
from lockstep.types import Batch


def clipped(logp: Tensor, batch: Batch, low: float, high: float) -> Tensor:
    """min(r·A, clip(r, 1−low, 1+high)·A) per token [N];  r = exp(ℓ − ℓp). No gradient beyond the side A pushes to."""
    r, A = bounded_exp(logp - batch.logp_prox), batch.advantage
    return torch.min(r * A, r.clamp(1 - low, 1 + high) * A)
