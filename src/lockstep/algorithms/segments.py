"""Sums and means over each sequence's sampled tokens, and exponentials that cannot overflow."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.types import Batch

MAX_LOG_RATIO = 20.0


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp with its argument clamped to ±20: our choice, in no paper."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def seq_count(counted: Tensor, batch: Batch) -> Tensor:
    """[B]: how many tokens of each sequence are in `counted` [N]."""
    return seq_sum(counted.float(), batch)


def seq_sum(x: Tensor, batch: Batch) -> Tensor:
    """[B]: Σ over each sequence of x [N]."""
    return torch.zeros(batch.num_seqs, dtype=x.dtype, device=x.device).index_add(0, batch.seq, x)


def seq_total(x: Tensor, batch: Batch) -> Tensor:
    """Σ x·m, broadcast back to the tokens [N]."""
    return seq_sum(torch.where(batch.mask, x, 0.0), batch)[batch.seq]


def seq_mean(x: Tensor, batch: Batch) -> Tensor:
    """seq(x) = Σ(x·m)/L, broadcast back to the tokens [N]; 0 for a sequence without a sampled token."""
    return seq_total(x, batch) / seq_count(batch.mask, batch).clamp(min=1)[batch.seq]
