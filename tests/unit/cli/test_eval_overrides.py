from __future__ import annotations

import pytest

from lockstep.assembly.recipe import Recipe
from lockstep.cli.inference import DRAWN, LOADED, TRAINED

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
