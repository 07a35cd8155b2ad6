"""Metrics that rules of the governor wait for in vain: this recipe, with this model, never logs them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lockstep.assembly.recipe import Recipe


def never_logged(recipe: Recipe, *, has_routes: bool) -> dict[str, str]:
    """The watched metrics that no step will have, each with the reason. `has_routes`: experts are looked at."""
    absent = list(_absent(recipe, has_routes))
    found = {name: [why for pattern, why in absent if re.match(pattern, name)] for name in recipe.governor.watched}
    return {name: reasons[0] for name, reasons in sorted(found.items()) if reasons}


def _absent(recipe: Recipe, has_routes: bool) -> Iterator[tuple[str, str]]:
    """Expressions that names begin with, and why a run of this recipe has none such."""
    yield r"(warmup|control)/", "it belongs to supervised learning, outside of the steps that are judged"
    if not recipe.eval.samples:
        yield r"eval/", "eval.samples is 0"
    if not recipe.eval.k:
        yield r"eval/(avg|pass)_at_k", "eval.k is 0"
    if recipe.rollout.precision is None:
        yield r"quant/", "rollout.precision is high"
    if not has_routes:
        yield r"routing/", "the model has no experts, or none that can be followed"
    if not recipe.algorithm.needs_values:
        yield r"value/", "the algorithm has no value head"
    if recipe.algorithm.kl is None:
        yield r"policy/kl_ref", "algorithm.kl is not set"
    if not recipe.train.max_staleness:
        yield r"\w+/lag[1-9]/", "train.max_staleness is 0"
