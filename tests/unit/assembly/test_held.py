"""What a resumed run goes on with: the recipe's settings, or more careful ones that the governor had reached."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from lockstep.assembly.governed import as_governed, held, in_words
from lockstep.assembly.recipe import Recipe
from lockstep.assembly.run import START
from lockstep.assembly.unlogged import never_logged
from lockstep.config.loading import validate
from lockstep.controller.checkpoints import Progress
from lockstep.controller.steward import Changes


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
    begun = make_recipe(rollout={"precision": recipe})
    assert in_words(as_governed(begun, left_by(precision=reached)).rollout.precision) == sampled


@pytest.mark.parametrize(("reached", "exact"), [(None, True), ("int8_w8a8", True), ("high", False)])
def test_what_cannot_be_exact_in_a_higher_precision_no_longer_is(reached: str | None, exact: bool) -> None:
    begun = make_recipe(rollout={"precision": "w4a8", "exact": True})
    now = as_governed(begun, left_by(precision=reached))
    assert now.rollout.exact == exact
    assert validate(Recipe, now.model_dump(mode="json"), "as a run keeps it").rollout.exact == exact


@pytest.mark.parametrize(
    ("recipe", "reached", "corrected"),
    [
        ("none", None, "none"),
        ("none", "tis", "tis"),
        ("none", "icepop", {"name": "icepop", "high": 2.0}),
        ({"name": "tis", "cap": 3.0}, "icepop", {"name": "icepop", "high": 3.0}),
        ("icepop", "tis", "icepop"),  # begun without, resumed with more than was reached
        ("geo_rs", "tis", "geo_rs"),  # or with one that is no rung
    ],
)
def test_the_stronger_correction(recipe: object, reached: str | None, corrected: object) -> None:
    begun = make_recipe(algorithm={"surrogate": "grpo", "correction": recipe})
    now = as_governed(begun, left_by(correction=reached))
    assert now.algorithm.model_dump(mode="json")["correction"] == corrected
    assert (now.algorithm == begun.algorithm) == (corrected == recipe)


@pytest.mark.parametrize(("recipe", "reached", "rate"), [(1e-3, None, 1e-3), (1e-3, 1e-4, 1e-4), (1e-5, 1e-4, 1e-5)])
def test_the_lower_learning_rate(recipe: float, reached: float | None, rate: float) -> None:
    begun = make_recipe(learner={"learning_rate": recipe})
    assert as_governed(begun, left_by(learning_rate=reached)).learner.learning_rate == rate


def test_keys_that_do_not_apply_are_named() -> None:
    begun = make_recipe(rollout={"precision": "w4a16"}, learner={"learning_rate": 1e-3})
    assert held(begun, START) == held(begun, left_by(learning_rate=1e-2)) == ""
    assert held(begun, left_by(precision="high", learning_rate=2.5e-4)) == (
        "held by the governor: rollout.precision = high (the recipe says w4a16), "
        "learner.learning_rate = 0.00025 (the recipe says 0.001)"
    )


def test_metrics_that_rules_wait_for_in_vain_are_named_with_the_reason() -> None:
    watched = ("eval/accuracy", "eval/pass_at_k", "quant/changed/layer0", "routing/differ", "mismatch/lag2/k3")
    rules = ["default", *(f"warn when {name} > 0" for name in (*watched, "policy/kl_ref", "mismatch/lag0/k3"))]
    dense = make_recipe(governor={"rules": rules}, eval={"samples": 0})
    assert never_logged(dense, has_routes=False) == {
        "eval/accuracy": "eval.samples is 0",
        "eval/pass_at_k": "eval.samples is 0",
        "mismatch/lag2/k3": "train.max_staleness is 0",
        "policy/kl_ref": "algorithm.kl is not set",
        "quant/changed/layer0": "rollout.precision is high",
        "routing/differ": "the model has no experts, or none that can be followed",
    }
    rich = {"eval": {"k": 4}, "rollout": {"precision": "w4a16"}, "train": {"steps": 1, "max_staleness": 2}}
    kl = {"algorithm": {"surrogate": "grpo", "kl": {"estimator": "k3"}}}
    assert never_logged(make_recipe(governor={"rules": rules}, **rich, **kl), has_routes=True) == {}


def make_recipe(**tables: Any) -> Recipe:
    needed = {"model": {"path": "x"}, "task": "arithmetic", "algorithm": {"surrogate": "grpo"}, "train": {"steps": 1}}
    return validate(Recipe, {**needed, **tables}, "my.toml")


def left_by(**changes: Any) -> Progress:
    return replace(START, governor={"changes": asdict(Changes(**changes))})


def test_a_correction_that_is_no_rung_is_named() -> None:
    chosen = make_recipe(algorithm={"surrogate": "grpo", "correction": "is"})
    assert (
        held(chosen, left_by(correction="icepop"))
        == "algorithm.correction = is takes the place of the governor's icepop"
    )
    assert (
        held(make_recipe(algorithm={"surrogate": "grpo", "correction": "icepop"}), left_by(correction="icepop")) == ""
    )


@pytest.mark.parametrize("name", [".", "..", ".hidden", "a/b"])
def test_a_run_stays_in_its_folder(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        make_recipe(name=name)
