"""What is summed of every token: with d = ℓp − ℓb on sampled tokens, p = π_prox, q = π_behav, and the weight."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lockstep.algorithms.diagnostics.splits import CELLS, LENGTH, constant, max_by_cell, sum_by_cell, token_cells
from lockstep.algorithms.diagnostics.tally import Tally
from lockstep.algorithms.segments import MAX_LOG_RATIO, seq_count
from lockstep.metrics import TAUS
from lockstep.types import Batch

_LOG_TAUS = tuple(map(math.log, TAUS))

# The rows of the tables, in order.
SUMS = ("n", "d", "k3", "w", "w²", "(w-1)²", "|p-q|", "p", "q", "p²", "q²", "pq", "truncated", "rejected", "lag")
SUMS += tuple(f"f{tau}" for tau in TAUS)
MAXIMA: tuple[str, ...] = ("w", "|p-q|", "lag")
ACCEPTANCE = ("answers", "accepted answers", "tokens", "accepted tokens")


@torch.no_grad()
def tally_mismatch(tally: Tally, batch: Batch, places: Tensor, weight: Tensor, bounds: tuple[float, float]) -> None:
    """Once per token of a step, from the proximal log-probs in `batch` and the correction's `weight` [N] and `bounds`.

    `places` [M] are those of the sampled tokens: to find them here would wait for the device.
    """
    terms, cells = _terms(batch, places, weight[places], bounds), token_cells(batch, places)
    tally.add("mismatch", sum_by_cell(torch.stack([terms[row] for row in SUMS]), cells, len(CELLS)))
    tally.raise_to("mismatch", max_by_cell(torch.stack([terms[row] for row in MAXIMA]), cells, len(CELLS)))
    tally.add("acceptance", _acceptance(batch, weight))


def _terms(batch: Batch, places: Tensor, weight: Tensor, bounds: tuple[float, float]) -> dict[str, Tensor]:
    """[M] each."""
    lp, lb, lag = (x[places].double() for x in (batch.logp_prox, batch.logp_behav, batch.lag))
    d, p, q = lp - lb, lp.exp(), lb.exp()
    excess = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expm1()  # w − 1, exact where w is near 1
    w = excess + 1
    rejected, (low, high) = weight == 0, bounds
    truncated = ~rejected & ((weight <= low) | (weight >= high))
    beyond = (d.abs() > constant(_LOG_TAUS, d.device)[:, None]).double()
    return {
        "n": torch.ones_like(d),
        "d": d,
        "k3": excess - d,
        "w": w,
        "w²": w * w,
        "(w-1)²": excess * excess,
        "|p-q|": (p - q).abs(),
        "p": p,
        "q": q,
        "p²": p * p,
        "q²": q * q,
        "pq": p * q,
        "truncated": truncated.double(),
        "rejected": rejected.double(),
        "lag": lag,
    } | {f"f{tau}": row for tau, row in zip(TAUS, beyond, strict=True)}


def _acceptance(batch: Batch, weight: Tensor) -> Tensor:
    """[4, lengths]: what the correction let through of answers of each length."""
    length, accepted = seq_count(batch.mask, batch), seq_count(batch.mask & (weight != 0), batch)
    x = torch.stack([(length > 0).double(), (accepted > 0).double(), length.double(), accepted.double()])
    return sum_by_cell(x, LENGTH.bucket(length)[None], len(LENGTH.cells))


@torch.no_grad()
def tally_entropy(tally: Tally, batch: Batch, entropy: Tensor) -> None:
    """Of the learner's distribution on sampled tokens; `entropy` [N]."""
    sampled = torch.where(batch.mask, entropy, 0.0).double()
    tally.add("entropy", torch.stack([batch.mask.sum().double(), sampled.sum()]))
