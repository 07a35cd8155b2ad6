"""Diagnostics against plain formulas over all tokens at once, whatever the micro-batches, and against closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.algorithms.corrections._product import Product
from lockstep.algorithms.corrections.geo_tis_band import GeoTisBand
from lockstep.algorithms.corrections.tis import TIS
from lockstep.algorithms.corrections.veto import Veto
from lockstep.algorithms.diagnostics import (
    TAUS,
    Tally,
    explained,
    metrics,
    tally_clipping,
    tally_entropy,
    tally_mismatch,
)
from lockstep.algorithms.diagnostics.splits import CELLS, LENGTH, SPLITS
from lockstep.data.packing import Row, blank, collate
from lockstep.metrics import describe
from lockstep.types import Batch

BEHAV = [[-1.0, -2.0, -0.5], [-3.0, -0.1], [-1.5, -1.5, -1.5, -1.5]]
SHIFT = [[0.0, 0.3, -0.8], [2.0, -0.05], [0.0, 5.0, -0.12, 0.1]]
FIGURES = {"tokens", "k1", "k3", "chi2", "ess", "w_max", "dp_mean", "dp_max", "truncated", "rejected"} | {
    f"f{tau}" for tau in TAUS
}

Weights = Callable[[Batch], Tensor]
Bounds = tuple[float, float]
NO_BOUNDS = (0.0, math.inf)


def make_row(behav: Sequence[float], prox: Sequence[float], advantage: float = 1.0, lag: int = 0) -> Row:
    """An answer after a prompt of two tokens."""
    mask = torch.arange(len(behav) + 2) >= 2
    return Row(
        tokens=torch.zeros(len(mask), dtype=torch.long),
        mask=mask,
        logp_behav=torch.tensor([0.0, 0.0, *behav]),
        logp_prox=torch.tensor([0.0, 0.0, *prox]),
        advantage=torch.where(mask, advantage, 0.0),
        lag=torch.where(mask, lag, 0).int(),
    )


def make_rows() -> list[Row]:
    pairs = zip(BEHAV, SHIFT, (-1.0, 0.0, 2.0), strict=True)
    return [
        make_row(behav, [b + s for b, s in zip(behav, shift, strict=True)], advantage, lag=len(behav))
        for behav, shift, advantage in pairs
    ]


def ratio(batch: Batch) -> Tensor:
    return (batch.logp_prox - batch.logp_behav).exp()


def truncated(batch: Batch) -> Tensor:
    return ratio(batch).clamp(max=2.0)


def tallied(micro_batches: Sequence[Sequence[Row]], weights: Weights = truncated, bounds: Bounds = (0, 2)) -> Tally:
    tally = Tally()
    for batch in map(collate, micro_batches):
        tally_mismatch(tally, batch, batch.mask.nonzero().squeeze(1), weights(batch), bounds)
        tally_entropy(tally, batch, torch.full_like(batch.logp_prox, 0.5))
    return tally


def measure(*micro_batches: Sequence[Row], weights: Weights = truncated, bounds: Bounds = (0, 2)) -> dict[str, float]:
    return metrics(tallied(micro_batches, weights, bounds))


def expected_figures(behav: Sequence[float], prox: Sequence[float]) -> dict[str, float]:
    """Of tokens listed one by one, by the plain formulas; the correction caps weights at 2."""
    n, d = len(behav), [p - b for p, b in zip(prox, behav, strict=True)]
    w, p, q = [math.exp(x) for x in d], [math.exp(x) for x in prox], [math.exp(x) for x in behav]
    dp = [abs(x - y) for x, y in zip(p, q, strict=True)]
    return {
        "tokens": n,
        "k1": -sum(d) / n,
        "k3": sum(math.exp(x) - 1 - x for x in d) / n,
        "chi2": sum((x - 1) ** 2 for x in w) / n,
        "ess": sum(w) ** 2 / sum(x * x for x in w) / n,
        "w_max": max(w),
        "dp_mean": sum(dp) / n,
        "dp_max": max(dp),
        "truncated": sum(x >= 2 for x in w) / n,
        "rejected": 0.0,
    } | {f"f{tau}": sum(max(x, 1 / x) > tau for x in w) / n for tau in TAUS}


def part(found: dict[str, float], name: str) -> dict[str, float]:
    """The figures of one part, by their own names."""
    prefix = f"mismatch/{name}/" if name else "mismatch/"
    return {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}


def test_every_figure_is_the_plain_formula() -> None:
    behav = [x for row in BEHAV for x in row]
    prox = [b + s for row, shift in zip(BEHAV, SHIFT, strict=True) for b, s in zip(row, shift, strict=True)]
    found = measure(make_rows())
    expected = expected_figures(behav, prox)
    assert {key: found[f"mismatch/{key}"] for key in expected} == pytest.approx(expected, rel=1e-5, abs=1e-7)
    correlation = torch.corrcoef(torch.tensor([prox, behav]).exp())[0, 1]
    assert found["mismatch/pearson"] == pytest.approx(float(correlation), rel=1e-5)
    assert found["policy/entropy"] == 0.5
    assert (found["rollout/lag_mean"], found["rollout/lag_max"]) == pytest.approx(((9 + 4 + 16) / 9, 4))
    assert [name for name in found if describe(name) is None] == []


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("lag3", [(0, 0), (0, 1), (0, 2)]),
        ("lag2", [(1, 0), (1, 1)]),
        ("adv_neg", [(0, 0), (0, 1), (0, 2)]),
        ("adv_zero", [(1, 0), (1, 1)]),
        ("adv_pos", [(2, i) for i in range(4)]),
        ("prob0.9", [(2, 1)]),
        ("prob0.1", [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 2), (2, 3)]),
        ("prob0.5", [(1, 1)]),
    ],
)
def test_a_part_has_the_figures_of_its_tokens(name: str, tokens: list[tuple[int, int]]) -> None:
    behav = [BEHAV[i][j] for i, j in tokens]
    prox = [BEHAV[i][j] + SHIFT[i][j] for i, j in tokens]
    found = part(measure(make_rows()), name)
    found.pop("pearson", None)
    assert found == pytest.approx(expected_figures(behav, prox), rel=1e-5, abs=1e-7)


def test_position_counts_sampled_tokens_and_not_the_prompt() -> None:
    rows = [make_row([-1.0] * 40, [-1.0 + 0.001 * i for i in range(40)]), make_row([-1.0] * 17, [-1.0] * 17)]
    observed = replace(rows[0], mask=rows[0].mask & (torch.arange(42) != 5))  # one token was not the model's
    found = measure([observed, rows[1]])
    assert {name: part(found, name)["tokens"] for name in ("pos0", "pos16", "pos32")} == {
        "pos0": 32,
        "pos16": 17,
        "pos32": 7,
    }
    assert part(found, "pos32")["k1"] == pytest.approx(-0.001 * sum(range(33, 40)) / 7, rel=1e-4)
    assert not part(found, "pos64")


def test_old_tokens_share_the_last_part_and_no_fresh_ones_means_no_lag0() -> None:
    found = measure([make_row([-1.0], [-1.0], lag=lag) for lag in (1, 8, 30)])
    assert part(found, "lag8")["tokens"] == 2
    assert found["rollout/lag_max"] == 30
    assert not part(found, "lag0")


# -- closed forms


def test_two_categorical_policies_enumerated() -> None:
    """The sampler draws token i with probability q_i; q in tenths, so ten tokens are the exact distribution."""
    p, q = [0.4, 0.1, 0.3, 0.2], [0.1, 0.2, 0.3, 0.4]
    drawn = [i for i, share in enumerate(q) for _ in range(round(10 * share))]
    row = make_row([math.log(q[i]) for i in drawn], [math.log(p[i]) for i in drawn])
    found = part(measure([row]), "")
    kl = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
    chi2 = sum((a - b) ** 2 / b for a, b in zip(p, q, strict=True))
    assert found["k1"] == pytest.approx(kl, rel=1e-5)
    assert found["k3"] == pytest.approx(kl, rel=1e-5)  # Σ q·w = 1 exactly, so k3 = k1
    assert found["chi2"] == pytest.approx(chi2, rel=1e-5)
    assert found["ess"] == pytest.approx(1 / (1 + chi2), rel=1e-5)
    assert found["w_max"] == pytest.approx(4.0)
    assert (found["f1.5"], found["f3"], found["f5"]) == pytest.approx((0.7, 0.1, 0.0))
    assert found["dp_mean"] == pytest.approx(sum(b * abs(a - b) for a, b in zip(p, q, strict=True)), rel=1e-5)


@pytest.mark.parametrize("sigma", [0.01, 0.1, 0.5])
def test_gaussian_log_ratios(sigma: float) -> None:
    """d ~ N(−σ²/2, σ²) has E[w] = 1: KL = σ²/2, χ² = e^{σ²} − 1, ESS = e^{−σ²}, F(τ) from the normal distribution."""
    num = 40_000
    places = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    d = -(sigma**2) / 2 + sigma * torch.special.ndtri(places)  # at the quantiles: no sampling noise
    found = part(measure([make_row([-3.0] * num, (d - 3).tolist())]), "")
    assert found["k1"] == pytest.approx(sigma**2 / 2, rel=2e-3)
    assert found["k3"] == pytest.approx(sigma**2 / 2, rel=5e-3)
    assert found["chi2"] == pytest.approx(math.expm1(sigma**2), rel=5e-3)
    assert found["ess"] == pytest.approx(math.exp(-(sigma**2)), rel=5e-3)
    for tau in TAUS:
        bounds = torch.tensor([math.log(tau) + sigma**2 / 2, math.log(tau) - sigma**2 / 2]) / -sigma
        assert found[f"f{tau}"] == pytest.approx(float(torch.special.ndtr(bounds).sum()), abs=1e-4)


def test_equal_policies_show_nothing_and_correlate_fully() -> None:
    logp = [-0.1, -1.0, -2.0]
    found = part(measure([make_row(logp, logp)]), "")
    assert (found["k1"], found["k3"], found["chi2"], found["dp_max"], found["f1.1"]) == (0, 0, 0, 0, 0)
    assert (found["ess"], found["w_max"], found["pearson"]) == (1, 1, pytest.approx(1))


def test_tiny_gaps_are_not_lost_in_rounding() -> None:
    gap = 2.0**-20
    found = part(measure([make_row([-1.0] * 8, [-1.0 + gap, -1.0 - gap] * 4)]), "")
    assert found["k3"] == pytest.approx(gap**2 / 2, rel=1e-4)
    assert found["chi2"] == pytest.approx(gap**2, rel=1e-4)


def test_no_correlation_without_spread() -> None:
    found = measure([make_row([-1.0] * 3, [-1.0, -1.5, -2.0])])
    assert "mismatch/pearson" not in found
    assert found["mismatch/k1"] == pytest.approx(0.5)


# -- what adds up

log_probs = st.floats(min_value=-1e4, max_value=0, width=32)
answers = st.lists(
    st.tuples(
        st.lists(st.tuples(log_probs, log_probs), max_size=20),
        st.sampled_from((-1.0, 0.0, 0.5)),
        st.integers(0, 12),
    ),
    min_size=1,
    max_size=6,
)


def drawn_rows(drawn: list[tuple[list[tuple[float, float]], float, int]]) -> list[Row]:
    return [make_row([b for b, _ in t], [p for _, p in t], advantage, lag) for t, advantage, lag in drawn]


@settings(deadline=None, max_examples=60)
@given(answers)
def test_any_finite_log_probs_give_finite_figures_and_parts_add_up(
    drawn: list[tuple[list[tuple[float, float]], float, int]],
) -> None:
    rows = drawn_rows(drawn)
    found = measure(rows)
    assert all(map(math.isfinite, found.values())), found
    if not found:
        assert all(not row.mask.any() for row in rows)
        return
    for split in SPLITS:
        parts = [cell for cell in split.cells if f"mismatch/{cell}/tokens" in found]
        for figure in FIGURES - {"ess"}:
            values = [(found[f"mismatch/{cell}/{figure}"], found[f"mismatch/{cell}/tokens"]) for cell in parts]
            whole = found[f"mismatch/{figure}"]
            if figure in ("w_max", "dp_max"):
                assert max(value for value, _ in values) == whole
            elif figure == "tokens":
                assert sum(value for value, _ in values) == whole
            else:
                mean = math.fsum(value * n for value, n in values) / found["mismatch/tokens"]
                assert mean == pytest.approx(whole, rel=1e-9, abs=1e-9 * max(abs(v) for v, _ in values))


@settings(deadline=None, max_examples=60)
@given(answers, answers)
def test_micro_batches_and_ranks_add_up(
    mine: list[tuple[list[tuple[float, float]], float, int]], theirs: list[tuple[list[tuple[float, float]], float, int]]
) -> None:
    rows, others = drawn_rows(mine), drawn_rows(theirs)
    together = measure([*rows, *others])
    assert measure(*([row] for row in (*rows, *others))) == pytest.approx(together, rel=1e-5, abs=1e-6)
    assert metrics(over_ranks(tallied([rows]), tallied([others]))) == pytest.approx(together, rel=1e-5, abs=1e-6)


def over_ranks(mine: Tally, theirs: Tally) -> Tally:
    """What both ranks have after their collectives, which see one flat tensor each."""

    def flat(tables: dict[str, Tensor]) -> Tensor:
        return torch.cat([table.flatten() for table in tables.values()])

    mine.combine(lambda x: x + flat(theirs.sums), lambda x: torch.maximum(x, flat(theirs.maxima)))
    return mine


def test_combining_a_copy_leaves_the_original_counting() -> None:
    tally = tallied([make_rows()])
    replace(tally).combine(lambda x: 2 * x, lambda x: 2 * x)
    assert metrics(tally) == measure(make_rows())


def test_nothing_sampled_is_nothing_measured() -> None:
    nothing = blank(make_rows()[0])
    assert measure([nothing]) == {}
    assert metrics(Tally()) == {}
    assert measure([nothing], make_rows(), [nothing]) == pytest.approx(measure(make_rows()))


# -- acceptance and clipping


def test_acceptance_by_length() -> None:
    """Short answers pass whole; of two longer ones, one is rejected and one loses its first four tokens."""
    lengths = (4, 4, 20, 20)
    rows = [make_row([-1.0] * n, [-1.0] * n) for n in lengths]

    def weights(batch: Batch) -> Tensor:
        lost = (batch.seq == 2) | ((batch.seq == 3) & (batch.positions < 6))
        return torch.where(lost, 0.0, 1.0)

    found = measure([*rows, blank(rows[0])], weights=weights, bounds=NO_BOUNDS)
    assert part(found, "len0") == {"answers": 2, "accepted_answers": 1, "accepted_tokens": 1}
    assert part(found, "len16") == {"answers": 2, "accepted_answers": 0.5, "accepted_tokens": 0.4}
    assert not part(found, "len32")
    assert found["mismatch/rejected"] == 0.5
    assert len(LENGTH.cells) == 12


def test_a_weight_at_either_bound_is_truncated_and_a_rejected_one_is_not() -> None:
    """Mean log-ratios of −1, 0 and 1 against a band of [1/c, c]; the last answer is vetoed."""
    rows = [make_row([-3.0] * 2, [-3.0 + shift] * 2) for shift in (-1.0, 0.0, 1.0)]
    rows += [make_row([-3.0] * 2, [-3.0 - 12.0] * 2)]
    correction = Product((GeoTisBand(cap=1.7), Veto()))
    found = measure(rows, weights=correction, bounds=correction.bounds)
    assert (found["mismatch/truncated"], found["mismatch/rejected"]) == (0.5, 0.25)
    capped = measure(rows, weights=TIS(), bounds=TIS().bounds)
    assert (capped["mismatch/truncated"], capped["mismatch/rejected"]) == (0.25, 0)


def test_a_token_with_an_advantage_but_no_gradient_was_clipped() -> None:
    batch = collate(make_rows())
    places = batch.mask.nonzero().squeeze(1)
    tally = Tally()
    tally_mismatch(tally, batch, places, torch.ones(15), NO_BOUNDS)
    assert "policy/clip_low" not in metrics(tally), "no update has been made"
    ratios = torch.tensor([1.0, 1.0, 0.5, 1.5, 1.0, 1.0, 1.0, 0.5, 1.5, 1.0, 1.0, 0.5, 0.5, 1.0, 1.5])
    gradient = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    live = batch.mask & (batch.advantage != 0)
    tally_clipping(tally, batch, places, ratios, gradient, live)
    found = metrics(tally)
    assert (found["policy/clip_low"], found["policy/clip_high"]) == pytest.approx((2 / 7, 2 / 7))
    assert (found["policy/adv_neg/clip_low"], found["policy/adv_pos/clip_low"]) == pytest.approx((1 / 3, 1 / 4))
    assert "policy/adv_zero/clip_low" not in found
    assert [name for name in found if describe(name) is None] == []


def test_names_of_parts_are_unique_and_documented() -> None:
    assert len(set(CELLS)) == len(CELLS)
    for cell in CELLS:
        assert describe(f"mismatch/{cell}/k3"), cell
    assert describe("mismatch/lag0/refused") is None
    assert describe("mismatch/lag0/nonsense") is None


def test_explained_variance() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0])
    assert explained(returns, returns + 5) == 1
    assert explained(returns, torch.zeros(3)) == 0
    assert explained(torch.ones(3), torch.zeros(3)) == 0
