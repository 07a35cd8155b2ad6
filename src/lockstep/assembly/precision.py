"""The precision sampling runs in: the recipe's, or higher where the governor has raised it during the run."""

from __future__ import annotations

from lockstep.assembly.recipe import Recipe
from lockstep.config import Plugin
from lockstep.controller.checkpoints import Progress
from lockstep.controller.governor import raised_precision
from lockstep.quant.ladder import HIGH, higher


def in_words(precision: Plugin | None) -> str:
    return HIGH if precision is None else precision.name


def rungs(recipe: Recipe) -> list[str]:
    """What the governor may raise the recipe's precision to, lowest first."""
    return [in_words(precision) for precision in higher(recipe.rollout.precision)]


def as_raised(recipe: Recipe, progress: Progress) -> Recipe:
    """The recipe with the precision that the run samples in at `progress`: its own, unless a higher one was reached."""
    above = {in_words(precision): precision for precision in higher(recipe.rollout.precision)}
    reached = raised_precision(progress.governor)
    if reached not in above:
        return recipe
    return recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"precision": above[reached]})})
