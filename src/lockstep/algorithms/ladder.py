"""Corrections by strength: what the governor climbs when sampler and learner drift apart."""

from __future__ import annotations

from pydantic import ValidationError

from lockstep.algorithms.config import AlgorithmConfig

LADDER = ("none", "tis", "icepop", "mis")
"""Weakest first: nothing; weights with a cap; tokens that disagree too much left out; whole answers left out."""


def stronger(algorithm: AlgorithmConfig) -> list[str]:
    """The rungs above the algorithm's own correction that its surrogate accepts, weakest first.

    A correction that is none of the rungs, or several at once, was chosen with more in mind: there is nothing above it.
    """
    names = [correction.name for correction in algorithm.correction_plugins]
    if len(names) != 1 or names[0] not in LADDER:
        return []
    above = LADDER[LADDER.index(names[0]) + 1 :]
    return [name for name in above if _accepts(algorithm, name)]


def _accepts(algorithm: AlgorithmConfig, correction: str) -> bool:
    try:
        AlgorithmConfig.model_validate(algorithm.model_dump() | {"correction": correction})
    except ValidationError:
        return False
    return True
