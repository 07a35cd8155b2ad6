"""Corrections by strength: what the governor climbs when sampler and learner drift apart.

none → tis → icepop, which leaves out what tis cuts: its upper bound is tis's cap C. A higher rung trusts the sampled
tokens less: under the sampler's distribution the mean weight never grows, 1 ≥ E[min(w, C)] ≥ E[w·1(α ≤ w ≤ C)], and
from tis on not even the weight of a single token does. Corrections of whole sequences are no rungs: the product over
an answer may be larger or smaller than the weight of any of its tokens.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from lockstep.algorithms.config import CORRECTIONS, AlgorithmConfig
from lockstep.config import Plugin

LADDER = ("none", "tis", "icepop")
TIS = Plugin(package=CORRECTIONS, name="tis")


def stronger(algorithm: AlgorithmConfig) -> list[str]:
    """The rungs above the algorithm's own correction that its surrogate accepts, weakest first.

    A correction that is none of the rungs, or several at once, was chosen with more in mind: there is nothing above it.
    """
    names = [correction.name for correction in algorithm.correction_plugins]
    if len(names) != 1 or names[0] not in LADDER:
        return []
    above = LADDER[LADDER.index(names[0]) + 1 :]
    return [name for name in above if _accepts(algorithm, name)]


def as_rung(algorithm: AlgorithmConfig, name: str) -> str | dict[str, Any]:
    """The correction as a recipe would say it. C is the cap of the algorithm's own tis, or else the usual one."""
    if name != "icepop":
        return name
    tis = next((correction for correction in algorithm.correction_plugins if correction.name == "tis"), TIS)
    return {"name": name, "high": tis.build().cap}


def _accepts(algorithm: AlgorithmConfig, correction: str) -> bool:
    try:
        AlgorithmConfig.model_validate(algorithm.model_dump() | {"correction": as_rung(algorithm, correction)})
    except ValidationError:
        return False
    return True
