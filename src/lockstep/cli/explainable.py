"""The names `lockstep explain` knows, without importing what they name: shells ask for them at every key."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from lockstep.config import choices
from lockstep.metrics import METRICS
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
    return [*methods, *(metric.name for metric in METRICS)]
