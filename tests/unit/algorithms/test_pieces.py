"""What holds for every surrogate and every correction in the folders; their equations are in tests/parity."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from lockstep.algorithms.config import ADVANTAGES, CORRECTIONS, REDUCTIONS, SURROGATES, AlgorithmConfig
from lockstep.algorithms.segments import seq_mean
from lockstep.config import ConfigError, Plugin, choices
from lockstep.config.base import FLOAT32
from lockstep.config.plugins import Chooser, load_class
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


def extreme(batch: Batch) -> Batch:
    """Probabilities so far apart that a plain exp would overflow."""
    return replace(batch, logp_prox=torch.where(batch.mask, batch.logp_behav + 200 * batch.advantage, 0.0))


@pytest.mark.parametrize("name", choices(SURROGATES))
def test_every_surrogate_is_finite_per_token_and_names_companions_that_exist(name: str) -> None:
    surrogate = load_class(SURROGATES, name)()
    batch = make_batch(SHAPES)
    for case in (batch, extreme(batch)):
        logp = new_logp(batch).requires_grad_()
        loss = surrogate(logp, case)
        loss.sum().backward()
        assert logp.grad is not None
        assert loss.shape == case.mask.shape
        assert loss.isfinite().all()
        assert logp.grad.isfinite().all()
    assert surrogate.companions.advantage in choices(ADVANTAGES)
    assert surrogate.companions.reduction in choices(REDUCTIONS)
    assert surrogate.companions.correction in choices(CORRECTIONS)


@pytest.mark.parametrize("name", choices(SURROGATES))
def test_a_good_answers_token_is_clipped_only_where_the_surrogates_own_ratio_is_above_one(name: str) -> None:
    """Tokens whose own ratios lie on both sides of 1, in answers whose mean and behaviour ratios lie elsewhere."""
    surrogate = load_class(SURROGATES, name)()
    batch = make_batch(SHAPES)
    batch = replace(batch, advantage=batch.advantage.abs(), logp_behav=batch.logp_prox - 0.5 * batch.seq)
    logp = new_logp(batch).requires_grad_()
    (gradient,) = torch.autograd.grad(surrogate(logp, batch).sum(), logp)
    clipped = batch.mask & (batch.advantage > 0) & (gradient == 0)
    assert (surrogate.companions.ratio(logp.detach(), batch)[clipped] > 1).all()


@pytest.mark.parametrize("name", choices(CORRECTIONS))
def test_every_correction_is_one_where_the_policies_agree_and_finite_where_they_do_not(name: str) -> None:
    correction = load_class(CORRECTIONS, name)()
    batch = make_batch(SHAPES)
    same = correction(replace(batch, logp_prox=batch.logp_behav))
    assert (same == 1).all()
    weight = correction(extreme(batch))
    assert weight.isfinite().all()
    assert (weight >= 0).all()
    low, high = correction.bounds
    assert ((weight == 0) | ((weight >= low) & (weight <= high))).all()


@pytest.mark.parametrize("package", [SURROGATES, CORRECTIONS])
def test_every_option_may_be_as_large_as_a_recipe_may_say(package: str) -> None:
    """What is refused there depends on nothing but its size, so whatever passes must run."""
    batch = make_batch(SHAPES)
    for name in choices(package):
        for field in fields(load_class(package, name)):
            try:
                piece = Chooser(package)({"name": name, field.name: FLOAT32[1]})
            except ConfigError:
                continue  # it has a bound of its own, or is no number
            assert isinstance(piece, Plugin)
            built = piece.build()
            built(new_logp(batch), batch) if package == SURROGATES else built(batch)


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
    assert [correction.name for correction in dapo.correction_plugins] == ["tis"]
    changed = AlgorithmConfig.model_validate(
        {"surrogate": {"name": "dapo", "high": 0.27}, "reduction": "seq_mean", "dynamic_sampling": False}
    )
    assert changed.build_objective().surrogate == load_class(SURROGATES, "dapo")(high=0.27)
    assert (changed.reduction_plugin.name, changed.replaces_groups) == ("seq_mean", False)
    assert AlgorithmConfig.model_validate({"surrogate": "ppo"}).needs_values
