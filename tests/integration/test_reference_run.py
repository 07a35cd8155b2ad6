"""Runs held to a reference: a resumed one is held to the model it began with, not to the one it goes on from."""

from __future__ import annotations

import json
from pathlib import Path

import command_runs as runs
import pytest

from lockstep.assembly.recipe import Recipe
from lockstep.assembly.run import train
from lockstep.config import ConfigError, load

KL = ("warmup.steps=3", "algorithm.kl.coef=0.5", "checkpoint.keep=1")


@pytest.fixture(autouse=True)
def _without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the time of so short a run."""
    monkeypatch.setattr("lockstep.assembly.run.write_report", lambda folder: None)


def recipe(folder: Path, *overrides: str) -> Recipe:
    return load(Recipe, runs.write_recipe(folder), overrides)


@pytest.mark.parametrize("more", [(), ("learner.dtype=bfloat16", "model.float32_logits=true")])
def test_a_resumed_run_keeps_its_reference_bit_for_bit(tmp_path: Path, more: tuple[str, ...]) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    train(recipe(tmp_path, *KL, *more, "train.steps=4"), straight, plain=True)
    train(recipe(tmp_path, *KL, *more, "train.steps=2"), broken, plain=True)
    kept = (broken / "reference/model.safetensors").read_bytes()
    train(recipe(tmp_path, *KL, *more, "train.steps=4"), broken, resume=True, plain=True)
    assert (broken / "reference/model.safetensors").read_bytes() == kept
    assert (straight / "reference/model.safetensors").read_bytes() == kept
    assert runs.weights(broken, 4) == runs.weights(straight, 4)
    distances = runs.metrics(straight, "policy/kl_ref")
    assert distances[1] == 0, "the reference is the model as the warm-up left it"
    assert distances[4] > distances[2] > 0
    assert runs.metrics(broken, "policy/kl_ref") == distances


def test_a_run_goes_on_that_was_begun_before_a_key_was_known_and_not_with_another_model(tmp_path: Path) -> None:
    train(recipe(tmp_path, "train.steps=1"), tmp_path / "run", plain=True)
    path = tmp_path / "run/config.json"
    config = json.loads(path.read_text())
    del config["model"]["float32_logits"]
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="was begun with another `model`"):
        train(recipe(tmp_path, "train.steps=2", "model.float32_logits=true"), tmp_path / "run", resume=True, plain=True)
    train(recipe(tmp_path, "train.steps=2"), tmp_path / "run", resume=True, plain=True)
    assert (tmp_path / "run/checkpoints/step-000002").exists()


def test_a_run_begun_without_a_reference_cannot_have_one_of_its_own(tmp_path: Path) -> None:
    train(recipe(tmp_path, "train.steps=1"), tmp_path / "run", plain=True)
    assert not (tmp_path / "run/reference").exists()
    held = recipe(tmp_path, "train.steps=2", "algorithm.kl.coef=0.5")
    with pytest.raises(ConfigError, match=r"begun without `algorithm\.kl`.*algorithm\.kl\.reference"):
        train(held, tmp_path / "run", resume=True, plain=True)
    assert json.loads((tmp_path / "run/config.json").read_text())["algorithm"]["kl"] is None, "as it was"
    step = tmp_path / "run/checkpoints/step-000001"
    held = recipe(tmp_path, "train.steps=2", f"algorithm.kl.reference={step}", "algorithm.kl.where=reward")
    train(held, tmp_path / "run", resume=True, plain=True)
    assert runs.metrics(tmp_path / "run", "policy/kl_ref") == {2: 0.0}


def test_a_reference_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    train(recipe(tmp_path, "train.steps=0"), tmp_path / "other", plain=True)
    folder = tmp_path / "other/checkpoints/step-000000"
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|system|>", "<|sistem|>"))
    with pytest.raises(ConfigError, match="its tokenizer is not that of the model"):
        train(
            recipe(tmp_path, "warmup.steps=1000000", f"algorithm.kl.reference={folder}"), tmp_path / "run", plain=True
        )
    assert not (tmp_path / "run").exists()
