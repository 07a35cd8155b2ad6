"""Every surrogate × correction × reduction in the folders against float64 references; a file without one fails here."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import reference_objectives as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_objectives import Answer
from torch import Tensor

from lockstep.algorithms.config import CORRECTIONS, REDUCTIONS, SURROGATES, AlgorithmConfig
from lockstep.algorithms.objective import Objective, Part
from lockstep.algorithms.rules import refusal
from lockstep.algorithms.segments import bounded_exp, seq_mean
from lockstep.config import Plugin, choices
from lockstep.config.plugins import load_class
from lockstep.types import Batch

LISTS = {name: (name,) for name in choices(CORRECTIONS)} | {
    "tis, veto": ("tis", "veto"),
    "geo_rs, geo_tis_band": ("geo_rs", "geo_tis_band"),
}
SPREADS = (0.0, 1e-4, 1e-3, 0.1, 1.0, 100.0)  # of log-ratios: inside GSPO's band to far beyond any exp

BOUNDS = (1e-4, 0.5, 0.8, 1 - 1e-3, 1 - 3e-4, 1 + 4e-4, 1 + 7e-4, 1 + 1e-3, 1.2, 1.28, 2, 3, 5)

Masks = list[list[bool]]
masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=7), min_size=2, max_size=6)


def make_sequences(shapes: Masks, seed: int) -> list[Answer]:
    """One advantage a sequence, exact zeros among them; ratios of a different spread in each."""
    rng = random.Random(seed)
    return [_make_sequence(m, rng) for m in shapes]


def _make_sequence(m: list[bool], rng: random.Random) -> Answer:
    A, new, old = rng.choice((0.0, rng.uniform(-3, 3), rng.uniform(-3, 3))), rng.choice(SPREADS), rng.choice(SPREADS)
    lb = [-rng.expovariate(0.5) if sampled else 0.0 for sampled in m]
    lp = [x + rng.uniform(-old, old) if sampled else 0.0 for x, sampled in zip(lb, m, strict=True)]
    now = [x + rng.uniform(-new, new) if sampled else 0.0 for x, sampled in zip(lp, m, strict=True)]
    return Answer(m, now, lp, lb, [A if sampled else 0.0 for sampled in m])


def beside_bounds() -> list[Answer]:
    """Two tokens whose ratio, in mean or in product, is just below or above a bound, r and w in turn, for A = ±1."""
    sides = product(BOUNDS, (-1e-5, 1e-5), (1, 2), (True, False), (1.0, -1.0))
    return [_beside(math.log(bound) / part + side, moves, A) for bound, side, part, moves, A in sides]


def _beside(x: float, moves: bool, A: float) -> Answer:
    lb = [-12.0, -12.0]
    lp = lb if moves else [b + x for b in lb]
    return Answer([True, True], [p + x for p in lp] if moves else lp, lp, lb, [A, A])


def to_batch(seqs: list[Answer], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Batch]:
    """ℓ and the rest."""
    lengths = torch.tensor([len(seq.m) for seq in seqs])
    ends, num = lengths.cumsum(0), int(lengths.sum())

    def field(name: str) -> Tensor:
        return torch.tensor([x for seq in seqs for x in getattr(seq, name)], dtype=dtype)

    batch = Batch(
        tokens=torch.zeros(num, dtype=torch.long),
        positions=torch.zeros(num, dtype=torch.long),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.long), ends]).int(),
        seq=torch.repeat_interleave(torch.arange(len(seqs)), lengths),
        mask=torch.tensor([x for seq in seqs for x in seq.m]),
        logp_behav=field("lb"),
        logp_prox=field("lp"),
        advantage=field("A"),
        lag=torch.zeros(num, dtype=torch.int32),
        temperature=1.0,
        max_seqlen=int(lengths.max()),
    )
    return field("now").requires_grad_(), batch


@cache
def make_objective(surrogate: str, correction: tuple[str, ...], reduction: str, count_rejected: bool) -> Objective:
    settings = {"surrogate": surrogate, "correction": correction}
    tables = settings | {"reduction": {"name": reduction, "count_rejected": count_rejected}}
    return AlgorithmConfig.model_validate(tables).build_objective()


def measure(objective: Objective, logp: Tensor, batch: Batch) -> tuple[Part, Tensor]:
    part = objective(logp, None, batch)
    (gradient,) = torch.autograd.grad(part.loss, [logp])
    return replace(part, loss=part.loss.detach()), gradient


@cache
def accepted(surrogate: str) -> list[str]:
    """The corrections a surrogate takes; what it refuses is tested with the config."""
    piece = Plugin(package=SURROGATES, name=surrogate)
    chosen = {name: [Plugin(package=CORRECTIONS, name=part) for part in parts] for name, parts in LISTS.items()}
    return [name for name, corrections in chosen.items() if not refusal(piece, corrections)]


Pieces = tuple[str, tuple[str, ...], str, bool]


def assert_parity(seqs: list[Answer], pieces: Pieces) -> None:
    value, slopes = reference.objective(seqs, *pieces)
    part, gradient = measure(make_objective(*pieces), *to_batch(seqs))
    count = float(part.count) or 1.0
    scale = max(map(abs, slopes)) + abs(value)  # terms of ± e^40 may cancel
    assert float(part.loss) / count == pytest.approx(value, rel=1e-6, abs=1e-6 * scale), pieces
    assert (gradient / count).tolist() == pytest.approx(slopes, rel=1e-6, abs=0), pieces
    assert not part.weight.requires_grad


@pytest.mark.parametrize("surrogate", choices(SURROGATES))
@given(shapes=masks, seed=st.integers(0, 2**32), count_rejected=st.booleans())
@settings(max_examples=12, deadline=None)
def test_value_and_gradient_are_the_references(surrogate: str, shapes: Masks, seed: int, count_rejected: bool) -> None:
    """Under every correction the surrogate takes, each with another of the reductions; float32 stays finite."""
    seqs, reductions = make_sequences(shapes, seed), choices(REDUCTIONS)
    for place, correction in enumerate(accepted(surrogate), start=seed):
        pieces = surrogate, LISTS[correction], reductions[place % len(reductions)], count_rejected
        assert_parity(seqs, pieces)
        single, gradient = measure(make_objective(*pieces), *to_batch(seqs, torch.float32))
        assert single.loss.isfinite()
        assert single.weight.isfinite().all()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("surrogate", choices(SURROGATES))
def test_bounds_are_exactly_where_the_references_have_them(surrogate: str) -> None:
    for correction in accepted(surrogate):
        assert_parity(beside_bounds(), (surrogate, LISTS[correction], "token_mean", True))


@pytest.mark.parametrize("surrogate", choices(SURROGATES))
@pytest.mark.parametrize("logp", [0.0, -1e3, -1e9])
def test_nothing_overflows_from_finite_log_probs(surrogate: str, logp: float) -> None:
    """Impossible tokens on each side alone, under every correction the surrogate takes."""
    far, near = [logp] * 4, [0.0] * 4
    for now, lp, lb in ((far, near, near), (near, far, near), (near, near, far)):
        seqs = [Answer([True] * 4, now, lp, lb, [A] * 4) for A in (2.0, -2.0)]
        for correction in accepted(surrogate):
            part, gradient = measure(
                make_objective(surrogate, LISTS[correction], "seq_mean", True), *to_batch(seqs, torch.float32)
            )
            assert part.loss.isfinite(), correction
            assert gradient.isfinite().all(), correction


@pytest.mark.parametrize("reduction", choices(REDUCTIONS))
@given(shapes=masks, seed=st.integers(0, 2**32), cut=st.integers(1, 4), count_rejected=st.booleans())
@settings(max_examples=25, deadline=None)
def test_micro_batches_add_up_to_the_whole(
    reduction: str, shapes: Masks, seed: int, cut: int, count_rejected: bool
) -> None:
    """Loss, denominator and gradient, token by token, with a correction that rejects tokens."""
    seqs = make_sequences(shapes, seed)
    objective = make_objective("gspo", ("icepop",), reduction, count_rejected)
    whole, gradient = measure(objective, *to_batch(seqs))
    parts = [measure(objective, *to_batch(part)) for part in (seqs[:cut], seqs[cut:]) if part]
    assert float(whole.count) == sum(float(part.count) for part, _ in parts)
    assert float(whole.loss) == pytest.approx(
        sum(float(p.loss) for p, _ in parts), rel=1e-9, abs=1e-9 * float(gradient.abs().sum())
    )
    assert torch.equal(gradient, torch.cat([gradient for _, gradient in parts]))


@given(shapes=masks, seed=st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_acr_is_tis_where_no_weight_is_truncated_and_for_every_negative_advantage(shapes: Masks, seed: int) -> None:
    logp, batch = to_batch(make_sequences(shapes, seed))
    acr, clip = (measure(make_objective(name, ("tis",), "seq_mean", True), logp, batch)[1] for name in ("acr", "grpo"))
    truncated = batch.mask & (bounded_exp(batch.logp_prox - batch.logp_behav) > 2)
    same = ~truncated | (batch.advantage <= 0)
    assert torch.equal(acr[same], clip[same])
    assert (acr[~same].abs() >= clip[~same].abs()).all()  # and elsewhere it only gives gradients back


def test_acr_moves_its_bound_where_a_weight_is_truncated() -> None:
    """w = 8 = 4·C: ρ = 1/4, so that r = 4 still learns and r = 5 does not; the plain clip stops both."""
    w, rs = torch.tensor(8.0).log(), torch.tensor([4.0, 5.0]).log()
    seqs = [Answer([True], [float(x)], [0.0], [-float(w)], [1.0]) for x in rs]
    for name, learns in (("acr", [True, False]), ("grpo", [False, False])):
        _, gradient = measure(make_objective(name, ("tis",), "seq_mean", True), *to_batch(seqs))
        assert (gradient != 0).tolist() == learns


def sequence_form(logp: Tensor, batch: Batch, low: float, high: float) -> Tensor:
    """GSPO's own objective (arXiv:2507.18071, Eq. 5): s with its whole gradient, once per sequence."""
    s = bounded_exp(seq_mean(logp - batch.logp_prox, batch))
    gain = torch.min(s * batch.advantage, s.clamp(1 - low, 1 + high) * batch.advantage)
    return -seq_mean(gain, batch)


@given(shapes=masks, seed=st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_the_two_forms_of_gspo_have_the_same_gradient(shapes: Masks, seed: int) -> None:
    logp, batch = to_batch(make_sequences(shapes, seed))
    objective = make_objective("gspo", ("none",), "seq_mean", True)
    ours = measure(objective, logp, batch)[1]
    first = torch.tensor([i == 0 or bool(batch.seq[i] != batch.seq[i - 1]) for i in range(len(batch.seq))])
    (theirs,) = torch.autograd.grad((sequence_form(logp, batch, 3e-4, 4e-4) * first).sum(), [logp])
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@given(shapes=masks, seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_tbpo_is_gspo_inside_its_band_and_nothing_outside(shapes: Masks, seed: int) -> None:
    """Up to the mismatch weight, which multiplies the gradients of a whole response."""
    logp, batch = to_batch(make_sequences(shapes, seed))
    part, tbpo = measure(make_objective("tbpo", ("geo_tis_band",), "seq_mean", True), logp, batch)
    _, gspo = measure(make_objective("gspo", ("none",), "seq_mean", True), logp, batch)
    s, negative = bounded_exp(seq_mean(logp.detach() - batch.logp_prox, batch)), batch.advantage < 0
    inside = torch.where(negative, (s >= 1 - 3e-4) & (s <= 1 + 7e-4), s <= 1 + 4e-4)
    assert (tbpo[~inside] == 0).all()
    torch.testing.assert_close(tbpo[inside], (part.weight * gspo)[inside], rtol=1e-9, atol=0)


@pytest.mark.parametrize("surrogate", ["reinforce", "rloo"])
def test_reinforce_takes_the_policy_of_now_for_the_proximal_one(surrogate: str) -> None:
    """Also in the weight: what was frozen before the step's first update plays no part."""
    logp, batch = to_batch(make_sequences([[True] * 5] * 4, seed=1))
    objective = make_objective(surrogate, ("tis",), "seq_mean_token_sum", True)
    part, gradient = measure(objective, logp, batch)
    moved = measure(objective, logp, replace(batch, logp_prox=batch.logp_prox - 3))
    assert torch.equal(gradient, moved[1])
    assert torch.equal(part.weight, bounded_exp(logp.detach() - batch.logp_behav).clamp(max=2))


def test_every_surrogate_agrees_with_the_policy_gradient_before_the_first_update() -> None:
    """At r = 1 and with no mismatch each is −A·∇ℓ, whatever it does later."""
    seqs = [replace(seq, now=seq.lb, lp=seq.lb) for seq in make_sequences([[True] * 6] * 5, seed=2)]
    logp, batch = to_batch(seqs)
    for name in choices(SURROGATES):
        (gradient,) = torch.autograd.grad(load_class(SURROGATES, name)()(logp, batch).sum(), [logp])
        torch.testing.assert_close(gradient, -batch.advantage, msg=lambda text, name=name: f"{name}: {text}")
