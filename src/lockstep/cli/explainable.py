"""The names `lockstep explain` knows, without importing what they name: shells ask for them at every key."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from lockstep.config import choices
from lockstep.controller.governor import DEFAULT_RULES
from lockstep.controller.rules import ACTIONS, parse
from lockstep.learner.routing_modes import ROUTING_MODES
from lockstep.metrics import METRICS
from lockstep.protocols import GOVERNOR
from lockstep.quant import FORMATS

FAMILIES = {
    "lockstep.algorithms.surrogates": "surrogate",
    "lockstep.algorithms.corrections": "correction",
    "lockstep.algorithms.advantages": "advantage",
    "lockstep.algorithms.reductions": "reduction",
    "lockstep.algorithms.kl": "KL estimator",
    FORMATS: "low-bit format",
    "lockstep.learner.optimisers": "optimiser",
}
"""Folders of plug-ins, and what one of them is called."""


def names() -> list[str]:
    """Of methods first, then of metrics; some name several things."""
    presets = [path.stem for path in Path(str(files("lockstep.presets"))).glob("*.toml")]
    methods = sorted({*presets, *(name for package in FAMILIES for name in choices(package))})
    return [*methods, *ROUTING_MODES, *governing(), *(metric.name for metric in METRICS)]


def governing() -> list[str]:
    """The governor, what it can do, and the rules that come along."""
    return [GOVERNOR, *ACTIONS, *(parse(text).name for text in DEFAULT_RULES)]
