"""Every surrogate, correction and reduction the folders hold, against references written from the paper's words."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.algorithms.config import PACKAGE, AlgorithmConfig
from lockstep.algorithms.objective import Objective
from lockstep.algorithms.segments import seq_mean
from lockstep.config import choices
from lockstep.config.plugins import load_class
from lockstep.data.packing import Row, collate
from lockstep.types import Batch


def make_row(length: int, sampled: int, generator: torch.Generator) -> Row:
    mask = torch.arange(length) >= length - sampled
    noise = torch.randn(3, length, generator=generator)
    behav = torch.where(mask, -1 - noise[0].abs(), 0.0)
    return Row(
        tokens=torch.zeros(length, dtype=torch.long),
        mask=mask,
        logp_behav=behav,
        logp_prox=torch.where(mask, behav + 0.5 * noise[1], 0.0),
        advantage=torch.where(mask, noise[2][0].expand(length), 0.0),
        lag=torch.zeros(length, dtype=torch.int32),
    )


def make_batch(shapes: list[tuple[int, int]], seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return collate([make_row(length, sampled, generator) for length, sampled in shapes])


SHAPES = [(9, 4), (6, 5), (12, 1), (5, 0), (30, 20)]


def new_logp(batch: Batch) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.where(batch.mask, batch.logp_prox + 0.4 * torch.randn(len(batch.mask), generator=generator), 0.0)


def clipped(low: float, high: float) -> Callable[[float, float, float], tuple[float, float]]:
    """Loss and slope of one token, case by case as the figure in the PPO paper draws it."""

    def loss(ratio: float, advantage: float, _: float) -> tuple[float, float]:
        if advantage >= 0 and ratio > 1 + high:
            return -(1 + high) * advantage, 0.0
        if advantage < 0 and ratio < 1 - low:
            return -(1 - low) * advantage, 0.0
        return -ratio * advantage, -ratio * advantage

    return loss


SURROGATES = {"ppo": clipped(0.2, 0.2), "grpo": clipped(0.2, 0.2), "dapo": clipped(0.2, 0.28)}
CORRECTIONS = {"none": lambda w: 1.0, "tis": lambda w: min(w, 2.0)}


def extreme(batch: Batch) -> Batch:
    """Probabilities so far apart that a plain exp would overflow."""
    return replace(batch, logp_prox=torch.where(batch.mask, batch.logp_behav + 200 * batch.advantage, 0.0))


@pytest.mark.parametrize("name", choices(f"{PACKAGE}.surrogates"))
def test_every_surrogate_is_finite_per_token_and_names_companions_that_exist(name: str) -> None:
    surrogate = load_class(f"{PACKAGE}.surrogates", name)()
    batch = make_batch(SHAPES)
    for case in (batch, extreme(batch)):
        logp = new_logp(batch).requires_grad_()
        loss = surrogate(logp, case)
        loss.sum().backward()
        assert logp.grad is not None
        assert loss.shape == case.mask.shape
        assert loss.isfinite().all()
        assert logp.grad.isfinite().all()
    assert surrogate.advantage in choices(f"{PACKAGE}.advantages")
    assert surrogate.reduction in choices(f"{PACKAGE}.reductions")


@pytest.mark.parametrize("name", choices(f"{PACKAGE}.corrections"))
def test_every_correction_is_one_where_the_policies_agree_and_finite_where_they_do_not(name: str) -> None:
    correction = load_class(f"{PACKAGE}.corrections", name)()
    batch = make_batch(SHAPES)
    same = correction(replace(batch, logp_prox=batch.logp_behav))
    assert (same == 1).all()
    weight = correction(extreme(batch))
    assert weight.isfinite().all()
    assert (weight >= 0).all()
    assert (weight <= correction.cap).all()


@pytest.mark.parametrize("name", SURROGATES)
def test_surrogates_match_the_reference_in_value_and_gradient(name: str) -> None:
    batch = make_batch(SHAPES)
    logp = new_logp(batch).double().requires_grad_()
    exact = replace(batch, logp_prox=batch.logp_prox.double(), advantage=batch.advantage.double())
    loss = load_class(f"{PACKAGE}.surrogates", name)()(logp, exact)
    loss.sum().backward()
    assert logp.grad is not None
    expected = [
        SURROGATES[name](math.exp(new - old), advantage, old)
        for new, old, advantage in zip(logp.tolist(), exact.logp_prox.tolist(), exact.advantage.tolist(), strict=True)
    ]
    assert loss.tolist() == pytest.approx([value for value, _ in expected], rel=1e-9, abs=1e-12)
    assert logp.grad.tolist() == pytest.approx([slope for _, slope in expected], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_match_the_reference_and_carry_no_gradient(name: str) -> None:
    batch = make_batch(SHAPES)
    weight = load_class(f"{PACKAGE}.corrections", name)()(batch)
    pairs = zip(batch.logp_prox.tolist(), batch.logp_behav.tolist(), strict=True)
    assert weight.tolist() == pytest.approx([CORRECTIONS[name](math.exp(p - b)) for p, b in pairs], rel=1e-5)
    assert not weight.requires_grad


def by_sequence(x: list[float], batch: Batch, counted: list[bool]) -> list[list[float]]:
    """The counted values of every sequence that has any."""
    offsets = batch.cu_seqlens.tolist()
    parts = [[x[t] for t in range(a, b) if counted[t]] for a, b in pairwise(offsets)]
    return [part for part in parts if part]


REDUCTIONS: dict[str, Callable[[list[list[float]]], float]] = {
    "token_mean": lambda seqs: sum(map(sum, seqs)) / sum(map(len, seqs)),
    "seq_mean": lambda seqs: sum(sum(s) / len(s) for s in seqs) / len(seqs),
    "seq_mean_token_sum": lambda seqs: sum(map(sum, seqs)) / len(seqs),
    "token_sum_norm": lambda seqs: sum(map(sum, seqs)) / (len(seqs) * 1024),
}


class RejectNegative:
    """Rejects every token that the learner finds less likely than the sampler did."""

    cap = math.inf

    def __call__(self, batch: Batch) -> Tensor:
        return (batch.logp_prox > batch.logp_behav).float()


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("count_rejected", [True, False])
def test_reductions_match_the_reference(name: str, count_rejected: bool) -> None:
    batch = make_batch(SHAPES)
    objective = make_objective(name, count_rejected)
    part = objective(new_logp(batch), None, batch)
    weight = RejectNegative()(batch)
    loss = (weight * objective.surrogate(new_logp(batch), batch)).tolist()
    counted = batch.mask if count_rejected else batch.mask & (weight != 0)
    expected = REDUCTIONS[name](by_sequence(loss, batch, counted.tolist()))
    assert float(part.loss / part.count) == pytest.approx(expected, rel=1e-5)


def make_objective(reduction: str, count_rejected: bool) -> Objective:
    return Objective(
        surrogate=load_class(f"{PACKAGE}.surrogates", "dapo")(),
        correction=RejectNegative(),
        reduction=load_class(f"{PACKAGE}.reductions", reduction)(count_rejected=count_rejected),
    )


@pytest.mark.parametrize("name", REDUCTIONS)
@given(
    shapes=st.lists(st.integers(2, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))), min_size=2),
    cut=st.integers(1, 20),
    count_rejected=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_any_split_adds_up(name: str, shapes: list[tuple[int, int]], cut: int, count_rejected: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [make_row(length, sampled, generator) for length, sampled in shapes]
    cut = min(cut, len(rows) - 1)
    objective = make_objective(name, count_rejected)
    whole, *parts = (collate(part) for part in (rows, rows[:cut], rows[cut:]))
    full = objective(whole.logp_prox.double(), None, whole)
    sums = [objective(part.logp_prox.double(), None, part) for part in parts]
    assert float(full.loss) == pytest.approx(sum(float(p.loss) for p in sums), rel=1e-5, abs=1e-6)
    assert int(full.count) == sum(int(p.count) for p in sums)


def test_sequence_means_broadcast_back_and_ignore_prompts() -> None:
    batch = make_batch([(4, 2), (3, 0)])
    mean = seq_mean(torch.tensor([100.0, 100.0, 1.0, 3.0, 7.0, 7.0, 7.0]), batch)
    assert mean.tolist() == [2.0] * 4 + [0.0] * 3


def test_a_method_names_its_companions_and_each_can_be_replaced() -> None:
    dapo = AlgorithmConfig.model_validate({"surrogate": "dapo"})
    assert (dapo.reduction_plugin.name, dapo.advantage_plugin.name, dapo.replaces_groups) == (
        "token_mean",
        "grpo",
        True,
    )
    assert dapo.correction.name == "tis"
    changed = AlgorithmConfig.model_validate(
        {"surrogate": {"name": "dapo", "high": 0.27}, "reduction": "seq_mean", "dynamic_sampling": False}
    )
    assert changed.build_objective().surrogate == load_class(f"{PACKAGE}.surrogates", "dapo")(high=0.27)
    assert (changed.reduction_plugin.name, changed.replaces_groups) == ("seq_mean", False)
    assert AlgorithmConfig.model_validate({"surrogate": "ppo"}).needs_values
