"""Adaptive clipping range (QuRL, OpenReview eG0bpCwdKn, Eq. 9): gives the clip what truncated weights took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import PositiveFloat
from torch import Tensor

from lockstep.algorithms.pieces import Companions
from lockstep.algorithms.ratios import mismatch, prox_ratio
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class ACR:
    """−min(r·A, clip(r, 1−ε, (1+ε)/ρ)·A);  ρ = min(1, C/w) detached, r = exp(ℓ − ℓp), w = exp(ℓp − ℓb).

    It equals PPO's clip wherever w ≤ C or A < 0. The largest bound of a step is (1+ε)·max(1, w/C) of the metric
    `mismatch/adv_pos/w_max`: with a w of 1e5 it is in effect gone.
    """

    companions: ClassVar[Companions] = Companions(advantage="grpo", reduction="seq_mean", shares="cap")
    eps: PositiveFloat = 0.2
    """ε: how far r may move from 1 before the gradient stops."""
    cap: PositiveFloat = 2.0
    """C of the correction `tis`. The paper states none."""

    def __call__(self, logp: Tensor, batch: Batch) -> Tensor:
        r, A, w = prox_ratio(logp, batch), batch.advantage, mismatch(batch)
        rho = (self.cap / w).clamp(max=1)
        bound = (1 + self.eps) / rho
        return -torch.min(r * A, r.clamp(max=bound).clamp(min=1 - self.eps) * A)
