"""Generalised advantage estimation (Schulman et al., arXiv:1506.02438, Eq. 16)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from lockstep.algorithms.pieces import Episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class GAE:
    """A_t = Σ_k (γλ)^k δ_{t+k};  δ_t = R_t + γ·V_{t+1} − V_t, the reward on the last token, V = 0 after it."""

    scope: ClassVar[str] = "group"
    needs_values: ClassVar[bool] = True
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """γ: how much less a reward is worth one token earlier."""
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0
    """λ: 1 trusts the rewards that came, 0 the value head's prediction of them."""

    def __call__(self, episodes: Episodes) -> Tensor:
        V, seq = episodes.values, episodes.seq.tolist()
        assert V is not None, "gae needs a value head"
        values, rewards, A = V.tolist(), episodes.rewards.tolist(), [0.0] * len(seq)
        for t in reversed(range(len(seq))):
            last = t + 1 == len(seq) or seq[t + 1] != seq[t]
            delta = rewards[seq[t]] - values[t] if last else self.gamma * values[t + 1] - values[t]
            A[t] = delta if last else delta + self.gamma * self.lam * A[t + 1]
        return torch.tensor(A)
