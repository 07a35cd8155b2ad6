"""Every method of the folder in the learner's own step, with its own companions."""

from __future__ import annotations

import math

import pytest
import torch
from making import make_core, make_groups, run_step

from lockstep.algorithms.config import ADVANTAGES, SURROGATES
from lockstep.config import choices
from lockstep.config.plugins import load_class


@pytest.mark.parametrize("surrogate", choices(SURROGATES))
def test_it_learns(surrogate: str) -> None:
    mini_steps = 1 if load_class(SURROGATES, surrogate).companions.one_update else 2
    core = make_core({"surrogate": surrogate}, {"mini_steps": mini_steps})
    before = {name: tensor.clone() for name, tensor in core.weights().items()}
    metrics = run_step(core, make_groups())
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["policy/skipped"] == 0
    assert any(not torch.equal(tensor, before[name]) for name, tensor in core.weights().items())


def test_a_step_in_which_all_is_rejected_moves_nothing() -> None:
    """The sampler of these groups is nothing like the learner."""
    for count_rejected in (True, False):
        reduction = {"name": "seq_mean", "count_rejected": count_rejected}
        core = make_core({"surrogate": "grpo", "correction": ["tis", "geo_rs"], "reduction": reduction})
        before = {name: tensor.clone() for name, tensor in core.weights().items()}
        metrics = run_step(core, make_groups())
        assert (metrics["mismatch/rejected"], metrics["policy/skipped"]) == (1, 1)
        assert all(torch.equal(tensor, before[name]) for name, tensor in core.weights().items())


@pytest.mark.parametrize("advantage", choices(ADVANTAGES))
def test_only_advantages_of_one_group_are_streamed(advantage: str) -> None:
    core = make_core({"surrogate": "dapo", "advantage": advantage})
    assert core.streams == (advantage not in ("gae", "reinforce_pp"))


@pytest.mark.parametrize(("surrogate", "mini_steps"), [("ppo_is", 1), ("gspo", 2)])
def test_clipped_tokens_are_counted_on_the_side_of_the_ratio_that_was_clipped(surrogate: str, mini_steps: int) -> None:
    """A clip stops bad answers below 1 and good ones above it, though of PPO-IS r is 1 in a step's first update, and
    of GSPO the tokens of an answer lie on both sides."""
    core = make_core({"surrogate": surrogate, "advantage": "grpo"}, {"mini_steps": mini_steps, "epochs": mini_steps})
    metrics = run_step(core, make_groups())
    assert metrics["policy/adv_neg/clip_low"] > 0
    assert (metrics["policy/adv_neg/clip_high"], metrics["policy/adv_pos/clip_low"]) == (0, 0)
