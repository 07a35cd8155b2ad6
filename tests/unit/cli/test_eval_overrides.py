from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from lockstep.assembly.recipe import Recipe
from lockstep.cli import recipe_files
from lockstep.cli.inference import DRAWN, LOADED, TRAINED, checkpoint_and_recipe
from lockstep.config import load
from lockstep.models.tiny import TinyModel, tiny_model

READ = {"preset", "seed", "device", "task", "rollout", "eval", "judge"}


def test_every_part_of_a_recipe_is_read_by_an_evaluation_or_refused() -> None:
    tables = {key for key in TRAINED if "." not in key}
    assert tables | READ | {"model"} == set(Recipe.model_fields)
    assert not tables & READ


@pytest.mark.parametrize("key", sorted({key for key in TRAINED if "." in key} | DRAWN | {LOADED}))
def test_what_is_named_is_a_key(key: str) -> None:
    table, _, leaf = key.partition(".")
    default = Recipe.model_fields[table].default
    assert leaf in type(default).model_fields


def test_a_recipe_that_is_exact_is_looked_at_without(tmp_path: Path) -> None:
    """On a CPU too: with `--recipe` as with a run."""
    tiny_model(TinyModel(hidden=32, layers=1, heads=2, context=64), 0).save_pretrained(tmp_path / "model")
    quickstart, exact = recipe_files.find("quickstart").read_text(), tmp_path / "exact.toml"
    exact.write_text(quickstart.replace("[rollout]", '[rollout]\nexact = true\nprecision = "int8_w8a8"'))
    assert load(Recipe, exact, []).rollout.exact
    chosen = checkpoint_and_recipe(str(tmp_path / "model"), ["device=cpu"], str(exact), Console())[1]
    assert not chosen.rollout.exact
