"""What a run logged, as series over steps. Reads a finished run and one that is still being written alike."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.report.jsonl import Row
from lockstep.report.run_folder import RunFolder, is_warmup

_CLOCK = frozenset({"step", "wall"})


@dataclass(frozen=True, slots=True)
class Series:
    """One metric: a value per step at which it was logged, in order of steps. Values may be NaN or infinite."""

    steps: NDArray[np.float64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def first(self) -> float:
        return float(self.values[0])

    @property
    def last(self) -> float:
        return float(self.values[-1])

    @property
    def finite(self) -> NDArray[np.float64]:
        """The values one can add up and compare; may be empty."""
        return self.values[np.isfinite(self.values)]

    def since(self, step: float) -> Series:
        return Series(self.steps[self.steps >= step], self.values[self.steps >= step])

    def thin(self, limit: int) -> Series:
        """At most `limit` points that look the same: of every stretch its lowest and its highest, so spikes stay."""
        if len(self) <= limit:
            return self
        stretches = np.array_split(np.arange(len(self)), limit // 2)
        keep = {int(i) for part in stretches for i in _extremes(self.values, part)}
        index = np.array(sorted(keep))
        return Series(self.steps[index], self.values[index])


def _extremes(values: NDArray[np.float64], part: NDArray[np.int64]) -> tuple[int, int]:
    finite = part[np.isfinite(values[part])]
    if not len(finite):
        return part[0], part[0]
    return finite[values[finite].argmin()], finite[values[finite].argmax()]


@dataclass(frozen=True, slots=True)
class History:
    name: str
    series: dict[str, Series]
    seconds: float  # wall time the run was at work, without the gaps between a stop and its resume
    supervised: dict[str, float] = field(default_factory=dict)  # of those, of the warm-up and of the control
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    events: list[Row] = field(default_factory=list)

    @classmethod
    def read(cls, folder: RunFolder) -> History:
        supervised: dict[str, float] = {}
        series = collect(_timing(folder.read_metrics(), supervised))
        clock = series.pop("time", None)
        return cls(
            name=folder.name,
            series=series,
            seconds=float(clock.values.max()) if clock else 0.0,
            supervised=supervised,
            config=folder.read_config(),
            environment=folder.read_environment(),
            events=list(folder.read_events()),
        )

    def match(self, pattern: str) -> dict[str, Series]:
        """The logged metrics of a family such as `time/*`."""
        return {name: series for name, series in self.series.items() if fnmatch(name, pattern)}

    @property
    def num_steps(self) -> int:
        """The last step of training; the warm-up counts its own."""
        return max((int(s.steps[-1]) for name, s in self.series.items() if not name.startswith("warmup/")), default=0)

    @property
    def sampled_tokens(self) -> float | None:
        """Tokens per busy second times busy seconds, where both were logged."""
        speed, busy = self.series.get("perf/rollout_tokens_per_s"), self.series.get("time/rollout")
        if speed is None or busy is None:
            return None
        _, left, right = np.intersect1d(speed.steps, busy.steps, return_indices=True)
        tokens = speed.values[left] * busy.values[right]
        return float(tokens[np.isfinite(tokens)].sum())


def _timing(rows: Iterable[Row], supervised: dict[str, float]) -> Iterator[Row]:
    """The rows, adding up on the way how long supervised learning took, which no step counts: from row to row."""
    before = 0.0
    for row in rows:
        phase = "warm-up" if is_warmup(row) else "control" if "control/accuracy" in row else None
        if phase:
            supervised[phase] = supervised.get(phase, 0.0) + row["time"] - before
        before = row["time"]
        yield row


def collect(rows: Iterable[Row]) -> dict[str, Series]:
    """Rows to series, `time` among them. A step logged twice counts as logged last.

    A long run has millions of values: they are packed as they come, and no row is kept.
    """
    steps: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
    values: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
    for row in rows:
        for name in row.keys() - _CLOCK:
            steps[name].append(row["step"])
            values[name].append(float(row[name]))
    return {name: _series(np.array(steps[name]), np.array(values[name])) for name in sorted(steps)}


def _series(steps: NDArray[np.float64], values: NDArray[np.float64]) -> Series:
    unique, last = np.unique(steps[::-1], return_index=True)
    return Series(unique, values[::-1][last])
