"""Soft adaptive policy optimisation (Gao et al., arXiv:2511.20347): a sigmoid in the place of the clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import PositiveFloat
from torch import Tensor

from lockstep.algorithms.pieces import Companions
from lockstep.algorithms.ratios import prox_ratio
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class SAPO:
    """−A·(4/τ)·σ(τ(r − 1)), τ by the sign of A;  r = exp(ℓ − ℓp). At r = 1 the gradient is PPO's."""

    companions: ClassVar[Companions] = Companions(advantage="grpo", reduction="seq_mean")
    tau_pos: PositiveFloat = 1.0
    """τ for A ≥ 0: the larger, the sooner the gradient fades as r leaves 1."""
    tau_neg: PositiveFloat = 1.05
    """τ for A < 0."""

    def __call__(self, logp: Tensor, batch: Batch) -> Tensor:
        r, A = prox_ratio(logp, batch), batch.advantage
        tau = torch.where(A < 0, self.tau_neg, self.tau_pos)
        return -A * 4 / tau * torch.sigmoid(tau * (r - 1))
