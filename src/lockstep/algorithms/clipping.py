"""The clipped objective of PPO and of what descends from it."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped(r: Tensor, A: Tensor, low: float, high: float) -> Tensor:
    """min(r·A, clip(r, 1−low, 1+high)·A) per token [N]. No gradient beyond the side A pushes to."""
    return torch.min(r * A, r.clamp(1 - low, 1 + high) * A)
