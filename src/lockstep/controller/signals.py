"""The metrics that rules look at: what each was early in the run, and lately."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import Any

EARLY = 8  # values that make up a metric's early value


@dataclass(slots=True)
class Series:
    """What rules need of one metric's past."""

    early: list[float] = field(default_factory=list)  # the first values
    recent: list[float] = field(default_factory=list)  # the last ones

    def add(self, value: float, window: int) -> None:
        if len(self.early) < EARLY:
            self.early.append(value)
        self.recent = [*self.recent, value][-window:]


@dataclass(slots=True)
class Signals:
    """The metrics that rules look at, by name."""

    windows: Mapping[str, int]  # how many values to keep of each
    series: dict[str, Series] = field(default_factory=dict)
    fresh: Set[str] = frozenset()  # those with a value in this step

    def add(self, metrics: Mapping[str, float]) -> None:
        """The values of one step. NaN is no value: it can be compared with nothing."""
        values = {name: value for name, value in metrics.items() if name in self.windows and not math.isnan(value)}
        self.fresh = values.keys()
        for name, value in values.items():
            self.series.setdefault(name, Series()).add(value, self.windows[name])

    def mean(self, name: str, window: int) -> float | None:
        """Of the last `window` values; None until there are so many."""
        values = self.series[name].recent[-window:] if name in self.series else []
        return sum(values) / window if len(values) == window else None

    def early(self, name: str) -> float | None:
        """None until there are enough values."""
        values = self.series[name].early if name in self.series else []
        return median(values) if len(values) == EARLY else None

    def trend(self, name: str, window: int) -> float:
        """Kendall's tau over the last `window` values: the share of pairs that go up less the share that go down."""
        values = self.series[name].recent[-window:] if name in self.series else []
        if len(values) < window:
            return 0.0
        pairs = [(later > earlier) - (later < earlier) for earlier, later in combinations(values, 2)]
        return sum(pairs) / len(pairs)

    def tell(self, name: str, window: int = 1) -> str:
        """The metric in words: `mismatch/k3 0.012 (early 0.003)`."""
        if name not in self.fresh:
            return f"{name} not logged in this step"
        mean, early = self.mean(name, window), self.early(name)
        shown = "logged too rarely yet" if mean is None else f"{mean:.3g}{f' over {window} steps' * (window > 1)}"
        return f"{name} {shown}" + (f" (early {early:.3g})" if early is not None else "")

    def state(self) -> dict[str, Any]:
        return {name: [series.early, series.recent] for name, series in self.series.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        self.series = {name: Series(*state[name]) for name in self.windows if name in state}
