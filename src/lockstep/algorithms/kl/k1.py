"""The plain log-ratio (Schulman, Approximating KL Divergence, 2020: k1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class K1:
    """ℓ − ℓref: unbiased, may be negative. As a loss it teaches nothing: its expected gradient, E[∇ℓ], is 0."""

    in_loss: ClassVar[bool] = False

    def __call__(self, logp: Tensor, logp_ref: Tensor) -> Tensor:
        return logp - logp_ref
