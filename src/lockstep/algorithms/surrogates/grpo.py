"""Group relative policy optimisation (Shao et al., arXiv:2402.03300, Eq. 3 without its KL term)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lockstep.algorithms.clipping import clipped
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPO:
    """−min(r·A, clip(r, 1−ε, 1+ε)·A);  r = exp(ℓ − ℓp), A normalised in the group, mean over each response first."""

    advantage: ClassVar[str] = "grpo"
    reduction: ClassVar[str] = "seq_mean"
    dynamic_sampling: ClassVar[bool] = False
    eps: float = 0.2

    def __call__(self, logp: Tensor, batch: Batch) -> Tensor:
        return -clipped(logp, batch, self.eps, self.eps)
