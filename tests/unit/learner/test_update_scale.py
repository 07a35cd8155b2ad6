"""`learner.update_scale`: two ways to the same training, and checkpoints that know nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from making import make_groups, run_step
from torch import Tensor

from lockstep.algorithms.config import AlgorithmConfig
from lockstep.config import ConfigError, Plugin
from lockstep.learner.config import OPTIMISERS, LearnerConfig
from lockstep.learner.optimisers import build_optimiser, set_learning_rate
from lockstep.learner.step import LearnerCore
from lockstep.learner.update_scale import UpdateScale
from lockstep.models import varlen
from lockstep.models.head import install_head
from lockstep.models.tiny import TinyModel, tiny_model
from lockstep.models.twins import use_attention

OFF: dict[str, Any] = {}
WEIGHTS = {"update_scale": 1.5}
RATES = {"update_scale": 1.5, "update_scale_by": "rates"}
# A tiny eps, for Adam's step to be independent of the gradient's size; no clipping, whose norm the scale changes.
LEARNER = {"learning_rate": 1e-3, "clip_norm": None, "weight_decay": 0.1}
ADAM = {"name": "adamw", "eps": 1e-20}
MUON = {"name": "muon", "eps": 1e-20}


def make_core(changes: dict[str, Any], experts: int = 0) -> LearnerCore:
    module = tiny_model(TinyModel(hidden=32, layers=2, heads=4, context=64, experts=experts), seed=0)
    config = LearnerConfig.model_validate(LEARNER | {"optimiser": ADAM} | changes)
    update_scale = UpdateScale.of(module, config)
    use_attention(module, varlen.NAME)
    install_head(module)
    algorithm = AlgorithmConfig.model_validate({"surrogate": "grpo"})
    return LearnerCore(module, algorithm, config, num_updates=10, update_scale=update_scale)


def trained(changes: dict[str, Any], experts: int = 0, steps: int = 3) -> dict[str, Tensor]:
    core = make_core(changes, experts)
    for step in range(steps):
        run_step(core, make_groups(seed=step))
    return {name: tensor.clone() for name, tensor in core.checkpoint().items()}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest difference of any weight."""
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.parametrize("optimiser", [ADAM, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("experts", [0, 4], ids=["dense", "mixture"])
def test_scaled_weights_train_as_scaled_learning_rates_do(optimiser: dict[str, Any], experts: int) -> None:
    weights, rates, off = (trained(arm | {"optimiser": optimiser}, experts) for arm in (WEIGHTS, RATES, OFF))
    assert distance(weights, rates) < 1e-6
    assert distance(weights, off) > 5e-4


def test_saved_weights_are_those_of_the_unscaled_model() -> None:
    scaled, plain = make_core(WEIGHTS), make_core(OFF)
    assert distance(scaled.weights(), plain.weights()) > 0.1
    assert distance(scaled.checkpoint(), plain.checkpoint()) < 1e-7


def test_a_bfloat16_model_comes_back_bit_for_bit() -> None:
    scaled, plain = (make_core(arm | {"dtype": "bfloat16"}).checkpoint() for arm in (WEIGHTS, OFF))
    assert all(tensor.dtype == torch.bfloat16 and torch.equal(tensor, plain[name]) for name, tensor in scaled.items())


@pytest.mark.parametrize("arm", [WEIGHTS, RATES], ids=["weights", "rates"])
def test_resumes_bit_for_bit(arm: dict[str, Any], tmp_path: Path) -> None:
    straight, resumed = make_core(arm), make_core(arm)
    run_step(straight, make_groups())
    straight.save(tmp_path)
    resumed.load(tmp_path)
    for core in (straight, resumed):
        run_step(core, make_groups(seed=1))
    assert all(torch.equal(tensor, resumed.weights()[name]) for name, tensor in straight.weights().items())


def test_a_state_with_another_scale_is_refused(tmp_path: Path) -> None:
    make_core(WEIGHTS).save(tmp_path)
    with pytest.raises(ConfigError, match=r"its update scale is 1\.5 by weights, the recipe's is off"):
        make_core(OFF).load(tmp_path)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_rates_multiply_learning_rates_and_leave_decay_alone(name: str) -> None:
    named = [(f"layers.{i}.mlp.up_proj.weight", torch.zeros(4, 4)) for i in range(2)] + [("norm.weight", torch.ones(4))]
    plugin = Plugin(package=OPTIMISERS, name=name)
    optimiser = build_optimiser(plugin, named, 1.0, 0.5, {"layers.1.mlp.up_proj.weight": 2.0, "norm.weight": 0.25})
    set_learning_rate(optimiser, 0.1)
    groups = {n: group for group in optimiser.param_groups for n in group["param_names"]}
    assert [groups[n]["lr"] for n, _ in named] == pytest.approx([0.1, 0.2, 0.025])
    assert [groups[n]["lr"] * groups[n]["weight_decay"] for n, _ in named] == pytest.approx([0.05, 0.05, 0.0])
