"""A KL term to a reference model: the loss, the reward, and what the reference itself must not do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from making import make_checkpoint, make_core, make_group, make_groups, run_step
from torch import Tensor
from transformers import AutoModelForCausalLM

from lockstep.algorithms.kl.k1 import K1
from lockstep.algorithms.reference import Penalty
from lockstep.learner.step import LearnerCore
from lockstep.learner.updates import Updater
from lockstep.metrics import describe
from lockstep.types import Batch, Trajectory

LOSS = {"estimator": "k3", "coef": 0.1}
REWARD = {"estimator": "k1", "coef": 0.5, "where": "reward"}
SAME = (1.0, 1.0, 1.0)


def held_core(
    folder: Path, kl: dict[str, Any], learner: dict[str, int] | None = None, *, seed: int = 0, experts: bool = False
) -> LearnerCore:
    """A core of `seed`, held to the model of seed 0."""
    core = make_core({"surrogate": "grpo", "kl": kl}, learner, seed=seed, experts=experts)
    core.load_reference(make_checkpoint(folder / "reference", experts=experts))
    return core


@pytest.mark.parametrize("kl", [LOSS, LOSS | {"estimator": "k2"}, REWARD], ids=["k3", "k2", "reward"])
@pytest.mark.parametrize("learner", [{}, {"mini_steps": 2, "epochs": 2}], ids=["one update", "four updates"])
def test_a_policy_begins_at_its_reference_and_leaves_it(
    tmp_path: Path, kl: dict[str, Any], learner: dict[str, int]
) -> None:
    core = held_core(tmp_path, kl, learner | {"micro_tokens": 60})
    first, second = (run_step(core, make_groups(seed=s), version=s) for s in range(2))
    assert first["policy/kl_ref"] == 0, "equal weights, equal arithmetic, equal log-probs"
    assert second["policy/kl_ref"] > 0
    assert [name for name in second if describe(name) is None] == []


@pytest.mark.parametrize("learner", [{}, {"mini_steps": 2}], ids=["streamed", "replayed"])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_without_any_advantage_the_loss_pulls_to_the_reference(
    tmp_path: Path, estimator: str, learner: dict[str, int]
) -> None:
    core = held_core(tmp_path, {"estimator": estimator, "coef": 1.0}, learner, seed=7)
    group = make_group(0, SAME)
    distances = [run_step(core, [group], version)["policy/kl_ref"] for version in range(12)]
    assert distances[-1] < 0.7 * distances[0]


def test_a_reference_is_frozen_and_stays_out_of_the_learner_s_state(tmp_path: Path) -> None:
    core = held_core(tmp_path, LOSS, experts=True)
    assert core.updater.reference is not None
    module = core.updater.reference.module
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for version in range(2):
        run_step(core, make_groups(seed=version), version)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert [name for name, p in module.named_parameters() if p.requires_grad or p.grad is not None] == []
    core.save(tmp_path)
    plain = make_core({"surrogate": "grpo"}, experts=True)
    plain.load(tmp_path)
    assert core.weights().keys() == plain.weights().keys()


@pytest.mark.parametrize("kl", [LOSS, REWARD], ids=["loss", "reward"])
def test_a_step_without_its_reference_fails(kl: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        run_step(make_core({"surrogate": "grpo", "kl": kl}), make_groups())


def test_what_counts_as_clipped_is_the_surrogate_s_doing(tmp_path: Path) -> None:
    """Where a ratio is clipped the KL still has a gradient."""
    learner = {"mini_steps": 2, "epochs": 2}
    plain, held = make_core({"surrogate": "grpo"}, learner), held_core(tmp_path, LOSS | {"coef": 1e-12}, learner)
    a, b = (run_step(core, make_groups()) for core in (plain, held))
    assert a["policy/clip_high"] > 0
    assert b["policy/clip_high"] == pytest.approx(a["policy/clip_high"])
    assert b["policy/clip_low"] == pytest.approx(a["policy/clip_low"])


def test_a_kl_in_the_reward_waits_for_the_whole_step() -> None:
    kinds = {where: make_core({"surrogate": "grpo", "kl": kl}).streams for where, kl in (("l", LOSS), ("r", REWARD))}
    assert kinds == {"l": True, "r": False}


def plain_logp(module: Any, trajectory: Trajectory) -> Tensor:
    """Of the sampled tokens, by the model's own forward."""
    with torch.no_grad():
        logits = module(trajectory.tokens[None]).logits[0, :-1]
    logp = logits.double().log_softmax(-1).gather(1, trajectory.tokens[1:, None]).squeeze(1)
    return logp[trajectory.mask[1:]]


def test_a_kl_in_the_reward_changes_advantages_as_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R' = R − ½·Σ(ℓp − ℓref), then (R' − mean) / (std + 1e-6)."""
    core = held_core(tmp_path, REWARD, seed=7)
    group = make_group(3, (1.0, 0.0, 0.5))
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(make_checkpoint(tmp_path / str(seed), seed=seed)) for seed in (7, 0)
    )
    paid = [
        reward - 0.5 * float((plain_logp(policy, t) - plain_logp(reference, t)).sum())
        for reward, t in zip((1.0, 0.0, 0.5), group.trajectories, strict=True)
    ]
    R = torch.tensor(paid, dtype=torch.float64)
    expected = (R - R.mean()) / (R.std() + 1e-6)
    seen: list[Batch] = []
    backward = Updater.backward
    monkeypatch.setattr(Updater, "backward", lambda *args: seen.append((made := backward(*args))[0]) or made)
    run_step(core, [group])
    (batch,) = seen
    found = [batch.advantage[batch.mask & (batch.seq == i)].unique().item() for i in range(3)]
    assert found == pytest.approx(expected.tolist(), rel=1e-3)


def test_a_penalty_by_hand() -> None:
    penalty = Penalty(K1(), coef=0.1)
    assert penalty(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -4.0])) == pytest.approx(0.1 * (0.5 + 2.0))


def test_temperature_reaches_the_reference(tmp_path: Path) -> None:
    core = held_core(tmp_path, LOSS)
    group = make_group(0, (1.0, 0.0))
    hot = replace(group, trajectories=tuple(replace(t, temperature=1.7) for t in group.trajectories))
    assert run_step(core, [hot])["policy/kl_ref"] == 0
