"""The log-ratio with a control variate (Schulman, Approximating KL Divergence, 2020: k3; the KL of GRPO's loss)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lockstep.algorithms.segments import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True, kw_only=True)
class K3:
    """exp(x) − 1 − x, x = ℓref − ℓ: unbiased, never negative. As a loss its gradient is that of KL(π_ref ‖ π_θ)."""

    in_loss: ClassVar[bool] = True

    def __call__(self, logp: Tensor, logp_ref: Tensor) -> Tensor:
        x = (logp_ref - logp).clamp(max=MAX_LOG_RATIO)  # in both terms: the second alone would push ℓ away from ℓref
        return x.expm1() - x
