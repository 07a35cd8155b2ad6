"""Every knob of the loop, turned in real (tiny) runs: they train, and sampler and learner stay together."""

from __future__ import annotations

from pathlib import Path

import command_runs as runs
import pytest

from lockstep.assembly.recipe import Recipe
from lockstep.assembly.run import train
from lockstep.config import load

CASES = {
    "moe": ["model.init.experts=4"],
    "moe, routed before the updates": ["model.init.experts=4", 'learner.routing="r2"', "learner.mini_steps=2"],
    "moe, routed anew": ["model.init.experts=4", 'learner.routing="off"', "learner.mini_steps=2"],
    "moe, recomputed, few pages": [
        "model.init.experts=8",
        "learner.activation_checkpointing=true",
        "learner.mini_steps=2",
        "rollout.max_seqs=3",
        "rollout.step_tokens=16",
        "rollout.kv_gib=0.00002",
    ],
    "moe in low bits, recomputed": [
        "model.init.experts=4",
        'rollout.precision="w4a16"',
        "learner.activation_checkpointing=true",
    ],
    "moe, ahead by one": ["model.init.experts=4", "train.max_staleness=1", 'rollout.update="reprefill"'],
    "dapo, several updates": ['algorithm.surrogate="dapo"', "learner.mini_steps=2", "learner.epochs=2"],
    "ppo with a value head": ['algorithm.surrogate="ppo"', "learner.mini_steps=2"],
    "no correction": ['algorithm.correction="none"'],
    "bands around sequences": ['algorithm.surrogate="tbpo"', "learner.mini_steps=2"],
    "a weight and a veto": [
        'algorithm.surrogate="acr"',
        'algorithm.correction=["tis", "veto"]',
        "learner.mini_steps=2",
    ],
    "batch-wide advantages": ['algorithm.surrogate="reinforce_pp"', 'algorithm.correction="icepop"'],
    "muon": ['learner.optimiser="muon"', "learner.learning_rate=1e-3"],
    "recomputed activations": ["learner.activation_checkpointing=true", "learner.micro_tokens=64"],
    "ahead by one": ["train.max_staleness=1"],
    "ahead by two, recomputed": ["train.max_staleness=2", 'rollout.update="reprefill"'],
    "ahead by one, drained": ["train.max_staleness=1", 'rollout.update="drain"'],
    "few rows and pages": ["rollout.max_seqs=3", "rollout.step_tokens=16", "rollout.kv_gib=0.00002"],
    "asleep by turns": ["model.init.experts=4", "rollout.sleep=true", "learner.mini_steps=2"],
    "warm": ["rollout.temperature=1.3", "eval.k=2"],
    "bfloat16": ["learner.dtype=bfloat16"],
    "float16": ["learner.dtype=float16"],
}
HALF = {"bfloat16", "float16"}


@pytest.mark.parametrize("name", CASES)
def test_it_trains(name: str, tmp_path: Path) -> None:
    overrides = ["train.steps=3", "eval.every=0", "checkpoint.every=0", *CASES[name]]
    recipe = load(Recipe, runs.write_recipe(tmp_path), overrides)
    root = tmp_path / "run"
    progress = train(recipe, root, plain=True)
    assert progress is not None
    assert progress.step == 3
    assert runs.weights(root, 3) != runs.weights(root, 0)
    assert max(runs.metrics(root, "rollout/lag_max").values()) <= recipe.train.max_staleness
    if "moe" in name:
        assert len(runs.metrics(root, "routing/differ")) == 3
    if recipe.train.max_staleness == 0:
        bound = 1e-2 if name in HALF else 1e-6
        assert max(runs.metrics(root, "mismatch/k3").values()) < bound


def test_sleep_changes_nothing_but_memory(tmp_path: Path) -> None:
    """Every group is there before the first is learned from, in the same order as without."""
    for sleep in ("true", "false"):
        overrides = ["train.steps=2", "eval.every=1", f"rollout.sleep={sleep}"]
        train(load(Recipe, runs.write_recipe(tmp_path), overrides), tmp_path / sleep, plain=True)
    assert runs.weights(tmp_path / "true", 2) == runs.weights(tmp_path / "false", 2)


def test_a_mixture_resumes_bit_for_bit(tmp_path: Path) -> None:
    def run(name: str, steps: int, *, resume: bool = False) -> Path:
        overrides = [f"train.steps={steps}", "eval.every=0", "model.init.experts=4", "learner.mini_steps=2"]
        train(load(Recipe, runs.write_recipe(tmp_path), overrides), tmp_path / name, resume=resume, plain=True)
        return tmp_path / name

    whole, parted = run("whole", 4), run("parted", 2)
    run("parted", 4, resume=True)
    assert runs.weights(parted, 4) == runs.weights(whole, 4)
    for name in ("routing/load_drift", "routing/load_entropy", "routing/differ", "routing/missing"):
        assert runs.metrics(parted, name) == runs.metrics(whole, name)
    assert set(runs.metrics(whole, "routing/missing").values()) == {0}
    assert max(runs.metrics(whole, "routing/load_drift").values()) > 0
