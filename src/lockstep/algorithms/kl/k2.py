"""Half the squared log-ratio (Schulman, Approximating KL Divergence, 2020: k2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class K2:
    """½(ℓ − ℓref)²: never negative, biased. As a loss its gradient is that of KL(π_θ ‖ π_ref)."""

    in_loss: ClassVar[bool] = True

    def __call__(self, logp: Tensor, logp_ref: Tensor) -> Tensor:
        return 0.5 * (logp - logp_ref) ** 2
