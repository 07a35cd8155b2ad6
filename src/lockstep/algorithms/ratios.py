"""The probability ratios every method is made of, their logarithms clamped to ±20: finite whatever the policies."""

from __future__ import annotations

from torch import Tensor

from lockstep.algorithms.segments import bounded_exp, seq_mean
from lockstep.types import Batch


def prox_ratio(logp: Tensor, batch: Batch) -> Tensor:
    """r = exp(ℓ − ℓp) [N]."""
    return bounded_exp(logp - batch.logp_prox)


def seq_ratio(logp: Tensor, batch: Batch) -> Tensor:
    """s = exp(seq(ℓ − ℓp)) on every token [N], as s_t = sg(s)·exp(ℓ − sg ℓ).

    Each token carries its own share of the gradient of s, so that a correction may weigh tokens differently; where
    it does not, the sum over a sequence is the gradient of s itself (GSPO, arXiv:2507.18071, Eqs. 13-14).
    """
    return bounded_exp(seq_mean(logp - batch.logp_prox, batch).detach() + (logp - logp.detach()))


def behav_ratio(logp: Tensor, batch: Batch) -> Tensor:
    """r' = exp(ℓ − ℓb) [N]."""
    return bounded_exp(logp - batch.logp_behav)


def mismatch(batch: Batch) -> Tensor:
    """w = exp(ℓp − ℓb) [N]."""
    return bounded_exp(batch.logp_prox - batch.logp_behav)
