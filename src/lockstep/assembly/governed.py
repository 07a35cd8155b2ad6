"""What a run goes on with: its recipe or, where the governor has gone further during the run, what that has reached.

Key by key the more careful of the two counts: the stronger correction, the higher precision, the lower staleness and
learning rate. So an override of `--resume` applies if it goes further still, and a run never falls back by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.algorithms.config import AlgorithmConfig
from lockstep.algorithms.ladder import as_rung, stronger
from lockstep.assembly.recipe import Recipe
from lockstep.config import Plugin
from lockstep.controller.checkpoints import Progress
from lockstep.controller.steward import Changes, Reach
from lockstep.quant.ladder import HIGH, batch_invariant, higher


def reach(recipe: Recipe) -> Reach:
    """How far the governor may go from the recipe."""
    return Reach(
        corrections=stronger(recipe.algorithm),
        precisions=[in_words(precision) for precision in higher(recipe.rollout.precision)],
        learning_rate=recipe.learner.learning_rate,
    )


def as_governed(recipe: Recipe, progress: Progress) -> Recipe:
    """The recipe as the governor has left it at `progress`. The gate's bound is lowered by the controller itself:
    groups that were admitted before keep theirs."""
    changes = Changes.of(progress.governor)
    precision = _precision(recipe, changes.precision)
    exact = recipe.rollout.exact and batch_invariant(precision)
    parts = {
        "algorithm": _algorithm(recipe.algorithm, changes.correction),
        "rollout": recipe.rollout.model_copy(update={"precision": precision, "exact": exact}),
        "learner": recipe.learner.model_copy(update={"learning_rate": _rate(recipe, changes.learning_rate)}),
    }
    return recipe.model_copy(update=parts)


def _algorithm(algorithm: AlgorithmConfig, reached: str | None) -> AlgorithmConfig:
    if reached not in stronger(algorithm):
        return algorithm
    return AlgorithmConfig.model_validate(algorithm.model_dump() | {"correction": as_rung(algorithm, reached)})


def _precision(recipe: Recipe, reached: str | None) -> Plugin | None:
    above = {in_words(precision): precision for precision in higher(recipe.rollout.precision)}
    return above.get(reached, recipe.rollout.precision) if reached else recipe.rollout.precision


def _rate(recipe: Recipe, reached: float | None) -> float:
    own = recipe.learner.learning_rate
    return own if reached is None else min(reached, own)


def held(recipe: Recipe, progress: Progress) -> str:
    """In words, what of the recipe does not apply because the governor has gone further, and what of the governor's
    does not because the recipe now says something else; empty if there is nothing to tell."""
    differ = [f"{key} = {now} (the recipe says {own})" for key, own, now in _settings(recipe, progress) if now != own]
    told = [f"held by the governor: {', '.join(differ)}"] if differ else []
    reached = Changes.of(progress.governor).correction
    applies = as_governed(recipe, progress).algorithm.correction_plugins
    if reached is not None and reached not in [correction.name for correction in applies]:
        told.append(f"algorithm.correction = {_correction(recipe)} takes the place of the governor's {reached}")
    return "; ".join(told)


def _settings(recipe: Recipe, progress: Progress) -> Iterator[tuple[str, object, object]]:
    """Keys that the governor may change: the recipe's value and the one that applies."""
    now = as_governed(recipe, progress)
    lowered = Changes.of(progress.governor).max_staleness
    staleness = recipe.train.max_staleness
    yield "algorithm.correction", _correction(recipe), _correction(now)
    yield "rollout.precision", in_words(recipe.rollout.precision), in_words(now.rollout.precision)
    yield "train.max_staleness", staleness, staleness if lowered is None else min(lowered, staleness)
    yield "learner.learning_rate", recipe.learner.learning_rate, now.learner.learning_rate


def _correction(recipe: Recipe) -> str:
    return ", ".join(_with_options(correction) for correction in recipe.algorithm.correction_plugins)


def _with_options(plugin: Plugin) -> str:
    return " ".join([plugin.name, *(f"{key}={value}" for key, value in plugin.options.items())])


def in_words(precision: Plugin | None) -> str:
    return HIGH if precision is None else precision.name
