"""What a run's numbers say about its health. Only rules that hold for every run raise a flag."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.metrics import METRICS, Metric, describe
from lockstep.report.history import History, Series


@dataclass(frozen=True, slots=True)
class Reading:
    """One logged metric; `flag` says what is wrong with it, or is empty."""

    name: str
    series: Series
    metric: Metric | None  # None: a name of the user's own
    flag: str


def readings(run: History) -> list[Reading]:
    """Every logged metric in the order of `metrics.py`, names of the user's own last."""
    found = [Reading(name, s, describe(name), flag(name, s, run.config)) for name, s in run.series.items()]
    return sorted(found, key=_order)


def _order(reading: Reading) -> tuple[int, list[tuple[float, str]]]:
    """Numbers in a name count as numbers: f2 comes before f10."""
    words = re.findall(r"\d+(?:\.\d+)?|\D+", reading.name)
    natural = [(float(word), "") if word[0].isdecimal() else (math.inf, word) for word in words]
    known = reading.metric in METRICS  # not so a figure of a part of the tokens
    return METRICS.index(reading.metric) if reading.metric and known else len(METRICS), natural


def flag(name: str, series: Series, config: Mapping[str, Any]) -> str:
    metric = describe(name)
    if not math.isfinite(series.last):
        return f"is {series.last}"
    if metric and metric.healthy == "0" and (bad := int((series.values > 0).sum())):
        return f"above 0 in {bad} of {len(series)} steps"
    if metric and metric.healthy == "<= max_staleness":
        return _stale(series, _find(config, "max_staleness"))
    if name == "mismatch/k3" and series.last >= 1e-3 and _should_agree(config):
        return "at 1e-3 or more, though sampler and learner should compute the same"
    if name == "rollout/truncated" and series.first <= 0.5 < series.last:
        return f"rose from {series.first:.0%} to {series.last:.0%}: answers no longer end"
    return ""


def _stale(series: Series, bound: object) -> str:
    largest = float(series.finite.max())
    return f"reached {largest:g}, max_staleness is {bound}" if isinstance(bound, int) and largest > bound else ""


def _should_agree(config: Mapping[str, Any]) -> bool:
    """Whether nothing a run was told explains a mismatch: no staleness, and no low bits that the learner has not."""
    rollout, learner = config.get("rollout", {}), config.get("learner", {})
    followed = not rollout.get("precision") or learner.get("alignment") == "aligned"
    same_cache = rollout.get("kv_precision", "high") == "high"
    return _find(config, "max_staleness") == 0 and followed and same_cache


def _find(config: Mapping[str, Any], key: str) -> object:
    """The value of a key, whichever table of the config it is in."""
    if key in config:
        return config[key]
    tables = (table for table in config.values() if isinstance(table, Mapping))
    return next((value for table in tables if (value := _find(table, key)) is not None), None)
