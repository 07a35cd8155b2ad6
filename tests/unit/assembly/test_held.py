"""Which precision a resumed run samples in: the recipe's, or a higher one that the governor had reached."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.assembly.precision import as_raised, in_words
from lockstep.assembly.recipe import Recipe
from lockstep.assembly.run import START
from lockstep.config.loading import validate


@pytest.mark.parametrize(
    ("recipe", "reached", "sampled"),
    [
        ("w4a16", None, "w4a16"),
        ("w4a16", "int8_w8a8", "int8_w8a8"),
        ("w4a16", "high", "high"),
        ("int8_w8a8", "int8_w8a8", "int8_w8a8"),  # begun in 4 bits, resumed in 8
        ("fp8_w8a8", "int8_w8a8", "fp8_w8a8"),
        ("int8_w8a8", "high", "high"),
        ("high", "int8_w8a8", "high"),
    ],
)
def test_the_higher_of_recipe_and_governor(recipe: str, reached: str | None, sampled: str) -> None:
    tables = {"model": {"path": "x"}, "task": "arithmetic", "algorithm": {"surrogate": "grpo"}, "train": {"steps": 1}}
    begun = validate(Recipe, {**tables, "rollout": {"precision": recipe}}, "my.toml")
    progress = replace(START, governor={"precision": reached})
    assert in_words(as_raised(begun, progress).rollout.precision) == sampled
