"""PPO's clip with a second one for bad answers (Ye et al., arXiv:1912.09729), as in QaRL's 'Dual-clip GRPO'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from lockstep.algorithms.clipping import clipped
from lockstep.algorithms.pieces import Companions
from lockstep.algorithms.ratios import prox_ratio
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class DualClip:
    """−min(r·A, clip(r, 1−ε, 1+ε)·A), and for A < 0 at most −c·A: no gradient once r > c;  r = exp(ℓ − ℓp)."""

    companions: ClassVar[Companions] = Companions(advantage="grpo", reduction="seq_mean")
    eps: PositiveFloat = 0.2
    """ε: how far r may move from 1 before the gradient stops."""
    c: Annotated[float, Field(gt=1)] = 3.0
    """The ratio from which a token with A < 0 has no gradient."""

    def __call__(self, logp: Tensor, batch: Batch) -> Tensor:
        r, A = prox_ratio(logp, batch), batch.advantage
        gain = clipped(r, A, self.eps, self.eps)
        return -torch.where(A < 0, torch.max(gain, self.c * A), gain)
