"""`lockstep bench diagnostics`: what measuring the mismatch costs, as a share of a training step.

One run of a recipe whose answers all have the same length; every second step goes without diagnostics. Two figures
come out: the difference of neighbouring steps, which is all there is but noisy, and the seconds counted inside the
diagnostics (the sums, the figures, and what more there is to record), which are steady.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from lockstep.assembly.recipe import Recipe
from lockstep.cli.bench_trl import Setting, quiet, recipe_tables, save_model, train
from lockstep.cli.benchmarks import Turn, processor
from lockstep.config import ConfigError
from lockstep.config.loading import validate
from lockstep.learner import passes, step, updates
from lockstep.protocols import Recorder
from lockstep.report.recorder import RunRecorder
from lockstep.report.run_folder import RunFolder
from lockstep.types import Group

LIMIT = 0.02
WARMUP = 2  # steps
TALLIES = (
    (passes, "tally_mismatch"),
    (passes, "tally_entropy"),
    (passes, "tally_kl"),
    (updates, "tally_clipping"),
)

_QUICKSTART = Setting(
    "quickstart", prompts=16, group_size=8, prompt_tokens=12, max_tokens=32, hidden=128, layers=2
)  # the sizes of the recipe of that name
_LARGER = Setting("larger", prompts=8, group_size=4, prompt_tokens=32, max_tokens=64, hidden=256, layers=6)
SETTINGS = {setting.name: setting for setting in (_QUICKSTART, _LARGER, replace(_LARGER, name="updates"))}
MINI_STEPS = {"updates": 4}


@dataclass(frozen=True, slots=True)
class Taken:
    """One step."""

    measured: bool  # with diagnostics
    seconds: float
    inside: float  # of them, counted inside diagnostics
    recording: float
    num_metrics: int


class Clock(Turn):
    """Takes the place of a Turn: every second step of the run it is told of goes without diagnostics."""

    def __init__(self, recorder: Recorder) -> None:
        self.taken: list[Taken] = []
        self._recorder = recorder
        self._measured = True
        self._patches = ExitStack()

    def begin(self) -> None:
        self._patches = ExitStack()
        for owner, name in (*TALLIES, (passes.Replayed, "_compare"), (step, "metrics")):
            known = getattr(owner, name)
            wanted = self._timed(known) if self._measured or name == "metrics" else _nothing
            self._patches.enter_context(patch.object(owner, name, wanted))
        self._inside = self._recording = 0.0
        self._depth = self._num_metrics = 0
        self._start = time.perf_counter()

    def count(self, samples: int, tokens: int) -> None: ...

    def close(self) -> None:
        self._patches.close()

    def end_step(self) -> None:
        seconds = time.perf_counter() - self._start
        self.taken.append(Taken(self._measured, seconds, self._inside, self._recording, self._num_metrics))
        self._patches.close()
        self._measured = not self._measured
        self.begin()

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            with self._counting():
                return function(*arguments)

        return timed

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Once where one of the functions calls another."""
        self._depth += 1
        start = time.perf_counter()
        yield
        self._depth -= 1
        self._inside += time.perf_counter() - start if self._depth == 0 else 0.0

    # -- as a recorder

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        start = time.perf_counter()
        self._recorder.log(step, metrics)
        self._recording += time.perf_counter() - start
        self._num_metrics += len(metrics)

    def samples(self, step: int, group: Group) -> None:
        self._recorder.samples(step, group)

    def event(self, step: int, kind: str, text: str) -> None:
        self._recorder.event(step, kind, text)


def _nothing(*arguments: object) -> None: ...


def compare(names: Sequence[str], *, pairs: int, threads: int | None, device: str, console: Console) -> None:
    if unknown := set(names) - set(SETTINGS):
        raise ConfigError(f"unknown setting {min(unknown)!r}; choices: {', '.join(SETTINGS)}")
    quiet()
    torch.set_num_threads(threads or os.cpu_count() or 1)
    console.print(f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}", highlight=False)
    found = {}
    for setting in (SETTINGS[name] for name in names or SETTINGS):
        with console.status(str(setting)):
            found[setting.name] = measure(setting, pairs, device)
    console.print(table(found))


def measure(setting: Setting, pairs: int, device: str) -> list[Taken]:
    """The steps of a run after its first, with diagnostics and without in turns."""
    steps = WARMUP + 2 * pairs
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(setting, folder / "model")
        tables = recipe_tables(setting, folder / "model", steps)
        tables["device"] = device
        tables["learner"]["mini_steps"] = MINI_STEPS.get(setting.name, 1)
        run = RunFolder.create(folder / "run")
        with RunRecorder(run) as recorder:
            clock = Clock(recorder)
            asyncio.run(train(validate(Recipe, tables, "bench diagnostics"), run, clock, clock))
            clock.close()
    return clock.taken[WARMUP:]


def table(found: Mapping[str, Sequence[Taken]]) -> Table:
    shown = Table("", title="cost of diagnostics, as shares of a step without them")
    for column in ("s per step", "figures a step", "counted inside", "difference of steps (quarters)", "below 2%"):
        shown.add_column(column, justify="right")
    for name, taken in found.items():
        seconds = median(one.seconds for one in taken if not one.measured)
        figures = max(one.num_metrics for one in taken) - min(one.num_metrics for one in taken)
        cost = inside(taken) / seconds
        low, middle, high = quantiles(differences(taken), n=4)
        spread = f"{middle:+.1%} ({low:+.1%} to {high:+.1%})"
        updates = f", {MINI_STEPS[name]} updates a step" if name in MINI_STEPS else ""
        shown.add_row(
            f"{SETTINGS[name]}{updates}",
            f"{seconds:.3f}",
            f"{figures}",
            f"{cost:.2%}",
            spread,
            "yes" if cost < LIMIT else "no",
        )
    return shown


def inside(taken: Sequence[Taken]) -> float:
    """Seconds of a step spent on diagnostics, the recording of their figures included."""
    counted = median(one.inside for one in taken if one.measured)
    with_, without = (median(one.recording for one in taken if one.measured is side) for side in (True, False))
    return counted + with_ - without


def differences(taken: Sequence[Taken]) -> list[float]:
    """Of every two neighbouring steps, how much longer the one with diagnostics took."""
    ordered = [(a, b) if b.measured else (b, a) for a, b in pairwise(taken)]
    return [with_.seconds / without.seconds - 1 for without, with_ in ordered]
