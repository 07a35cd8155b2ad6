"""Adam with decoupled weight decay (Loshchilov & Hutter, arXiv:1711.05101)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import NonNegativeFloat

from lockstep.learner.optimisers._grouping import Decay, Named, decay_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Decay acts on matrices only: not on norms, biases or embeddings."""

    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-8

    def __call__(self, named: Named, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
        # One pass over memory on either device: on a CPU 3-5 times faster than `foreach` or a loop, 1M to 100M weights.
        return torch.optim.AdamW(
            decay_groups(named, weight_decay), lr=learning_rate, betas=self.betas, eps=self.eps, fused=True
        )
