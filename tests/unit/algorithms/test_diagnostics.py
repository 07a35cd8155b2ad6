"""Diagnostics against plain formulas over all tokens at once, whatever the split."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lockstep.algorithms.diagnostics import TAUS, Tally, explained, metrics, tally_clipping, tally_mismatch
from lockstep.data.packing import Row, collate
from lockstep.metrics import describe

BEHAV = [[-1.0, -2.0, -0.5], [-3.0, -0.1], [-1.5, -1.5, -1.5, -1.5]]
SHIFT = [[0.0, 0.3, -0.8], [2.0, -0.05], [0.0, 5.0, -0.12, 0.1]]


def make_rows() -> list[Row]:
    rows = []
    for behav, shift in zip(BEHAV, SHIFT, strict=True):
        lb = torch.tensor([0.0, 0.0, *behav])
        mask = torch.arange(len(lb)) >= 2
        rows.append(
            Row(
                tokens=torch.zeros(len(lb), dtype=torch.long),
                mask=mask,
                logp_behav=lb,
                logp_prox=lb + torch.tensor([0.0, 0.0, *shift]),
                advantage=mask.float(),
                lag=torch.where(mask, len(behav), 0).int(),
            )
        )
    return rows


def measure(micro_batches: list[list[Row]]) -> dict[str, float]:
    tally = Tally()
    for rows in micro_batches:
        batch = collate(rows)
        weight = (batch.logp_prox - batch.logp_behav).exp().clamp(max=2.0)
        tally_mismatch(tally, batch, weight, 2.0, torch.full_like(weight, 0.5))
    return metrics(tally)


def test_every_figure_is_the_plain_formula() -> None:
    d = [x for shift in SHIFT for x in shift]
    n, w = len(d), [math.exp(x) for x in d]
    pairs = [(b, b + s) for behav, shift in zip(BEHAV, SHIFT, strict=True) for b, s in zip(behav, shift, strict=True)]
    dp = [abs(math.exp(p) - math.exp(b)) for b, p in pairs]
    found = measure([make_rows()])
    expected = {
        "mismatch/k1": -sum(d) / n,
        "mismatch/k3": sum(math.exp(x) - 1 - x for x in d) / n,
        "mismatch/w_max": max(w),
        "mismatch/ess": sum(w) ** 2 / sum(x * x for x in w) / n,
        "mismatch/dp_mean": sum(dp) / n,
        "mismatch/dp_max": max(dp),
        "mismatch/truncated": sum(x >= 2 for x in w) / n,
        "mismatch/rejected": 0.0,
        "policy/entropy": 0.5,
        "rollout/lag_mean": (3 * 3 + 2 * 2 + 4 * 4) / 9,
        "rollout/lag_max": 4.0,
        "policy/clip_low": 0.0,
        "policy/clip_high": 0.0,
    } | {f"mismatch/f{tau}": sum(max(x, 1 / x) > tau for x in w) / n for tau in TAUS}
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert all(describe(name) for name in found)
    assert {"mismatch/f1.1", "mismatch/f2", "mismatch/f100"} <= found.keys()


def test_micro_batches_add_up() -> None:
    rows = make_rows()
    assert measure([[row] for row in rows]) == pytest.approx(measure([rows]), rel=1e-6)


def test_a_token_with_an_advantage_but_no_gradient_was_clipped() -> None:
    tally = Tally()
    batch = collate(make_rows())
    tally_mismatch(tally, batch, torch.ones(15), math.inf, torch.zeros(15))
    ratio = torch.tensor([0.5, 1.5, 1.0, 0.5, 1.5] * 3)
    gradient: Tensor = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0] * 3)
    tally_clipping(tally, ratio, gradient, torch.ones(15, dtype=torch.bool))
    found = metrics(tally)
    assert (found["policy/clip_low"], found["policy/clip_high"]) == (0.2, 0.2)


def test_explained_variance() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0])
    assert explained(returns, returns + 5) == 1
    assert explained(returns, torch.zeros(3)) == 0
    assert explained(torch.ones(3), torch.zeros(3)) == 0
