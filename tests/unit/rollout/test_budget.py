"""Memory for keys and values where a recipe names none."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from engine_support import engine_core
from lockstep.assembly.estimate import estimate, gib_for_learner
from lockstep.config import ConfigError
from lockstep.models.tiny import TinyModel, tiny_model
from lockstep.rollout import budget
from lockstep.rollout.config import RolloutConfig
from role_support import make_recipe

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def _a_gpu_with_100_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "free_gib", lambda device: 100.0)


@pytest.mark.parametrize(("leave", "expected"), [(0, 85), (40, 51), (99, 10), (500, 10)])
def test_most_of_what_is_left_and_always_something(leave: float, expected: float) -> None:
    assert budget.kv_gib(RolloutConfig(), GPU, leave) == pytest.approx(expected)


def test_what_is_said_counts() -> None:
    assert budget.kv_gib(RolloutConfig(kv_gib=3), GPU, 500) == 3
    assert budget.kv_gib(RolloutConfig(kv_gib=3), torch.device("cpu")) == 3
    assert budget.kv_gib(RolloutConfig(), torch.device("cpu")) == budget.CPU_GIB


def test_rows_that_can_never_fill_it_take_less() -> None:
    """16 rows of 64 tokens, two layers, keys and values of 16 float32 each."""
    assert estimate(make_recipe(None))["keys and values"] == 16 * 64 * 2 * 2 * 16 * 4 / 2**30


def test_what_is_left_for_the_learner() -> None:
    module = tiny_model(TinyModel(hidden=32, layers=2, heads=4, context=64), 0)
    recipe = make_recipe(None)
    parts = estimate(recipe)
    own = sum(parts[name] for name in ("gradients", "optimiser", "activations (about)"))
    assert gib_for_learner(recipe, module, 1) == pytest.approx(own)
    asleep = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"sleep": True})})
    assert gib_for_learner(asleep, module, 1) == pytest.approx(parts["optimiser"])
    shared = (parts["gradients"] + parts["optimiser"]) / 4 + parts["activations (about)"] + 2 * parts["weights"]
    assert gib_for_learner(recipe, module, 4) == pytest.approx(shared)


def test_memory_that_is_not_there_is_told_in_one_line(dense: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match=r"rollout.kv_gib = 1e\+06 does not fit into the memory of cpu"):
        engine_core(dense, max_seqs=10**9, kv_gib=1e6)
