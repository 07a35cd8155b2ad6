"""`lockstep bench routing`: what replay does to the gap between a low-bit sampler and its learner.

Two tiny mixtures: one whose experts have nothing in common, and one that was warmed up on a task. Every format samples
answers from them, and the same tokens are scored with and without the sampler's experts, by a learner in high
precision and by an aligned one.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from lockstep.assembly.recipe import Recipe
from lockstep.assembly.roles import load_model
from lockstep.assembly.route_study import study
from lockstep.cli.bench_mismatch import Precision, in_words, precisions
from lockstep.cli.benchmarks import processor, write_into
from lockstep.cli.warm_start import MIXTURE, continued, drawn, warmed_up
from lockstep.config.loading import validate

HIGH = "high"
NAME = "gap"  # of its place on the page
ANSWERS = 4  # to each prompt
STD = 0.1  # of the matrices drawn at random


@dataclass(frozen=True, slots=True)
class Gap:
    """Between a sampler and a learner, on the same tokens."""

    differ: float  # share of routers at which the learner's own choice is another
    differ_tokens: float
    k3: float
    f2: float
    k3_replayed: float
    f2_replayed: float


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    precision: str
    apart: Gap  # learner in high precision
    aligned: Gap | None  # learner in the sampler's; None where that is high


def compare(*, samples: int, warmup: int, out: Path | None, json_out: Path | None, console: Console) -> None:
    console.print(conditions(samples, warmup), highlight=False, soft_wrap=True)
    rows = list(_rows(samples, warmup, console))
    text = f"{conditions(samples, warmup)}\n\n{table(rows)}"
    console.print(f"\n{text}", markup=False, highlight=False, soft_wrap=True)
    if out is not None:
        write_into(out, text, NAME)
    if json_out is not None:
        kept = {"conditions": conditions(samples, warmup), "rows": [asdict(row) for row in rows]}
        json_out.write_text(json.dumps(kept, indent=2) + "\n")


def _rows(samples: int, warmup: int, console: Console) -> Iterator[Row]:
    with TemporaryDirectory() as folder:
        yield from _rows_of("random", drawn(Path(folder) / "random", MIXTURE, STD), samples, console)
        console.print("warming up", highlight=False)
        yield from _rows_of("warmed up", warmed_up(Path(folder) / "warm", MIXTURE, warmup), samples, console)


def _rows_of(model: str, start: Path, samples: int, console: Console) -> Iterator[Row]:
    console.print(model, highlight=False)
    yield Row(model, HIGH, _gap(start, HIGH, "none", samples, console), None)
    for precision in precisions():
        apart, aligned = (_gap(start, precision, how, samples, console) for how in ("none", "aligned"))
        yield Row(model, in_words(precision), apart, aligned)


def _gap(start: Path, precision: Precision, alignment: str, samples: int, console: Console) -> Gap:
    changes = {"rollout": {"precision": precision}, "learner": {"alignment": alignment}}
    recipe = validate(Recipe, continued(start, changes), "bench routing")
    prompts = [sample.messages for sample in recipe.task.build().samples("eval")[:samples]]
    began, nobody = time.monotonic(), lambda what, done, total: None
    looking = study(recipe, load_model(recipe), prompts, name="", answers=ANSWERS, tell=nobody, checkpoint=str(start))
    found = asyncio.run(looking)
    live, replayed = found.live.metrics, found.replayed.metrics
    gap = Gap(
        differ=live["routing/differ"],
        differ_tokens=live["routing/differ_tokens"],
        k3=live["mismatch/k3"],
        f2=live["mismatch/f2"],
        k3_replayed=replayed["mismatch/k3"],
        f2_replayed=replayed["mismatch/f2"],
    )
    took = f"{time.monotonic() - began:.1f} s"
    line = f"  {in_words(precision)}, learner {alignment}: k3 {gap.k3:.1e} -> {gap.k3_replayed:.1e} ({took})"
    console.print(line, highlight=False)
    return gap


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    columns = ("model", "sampler", "learner", "routers differ", "tokens")
    columns += ("k3, live", "k3, replayed", "F(2), live", "F(2), replayed")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        name = f"| {row.model} | `{row.precision}`"
        lines.append(f"{name} | high | {_cells(row.apart)} |")
        lines += [f"{name} | aligned | {_cells(row.aligned)} |"] if row.aligned else []
    return "\n".join(lines)


def _cells(gap: Gap) -> str:
    shares = f"{gap.differ:.2%} | {gap.differ_tokens:.1%}"
    return f"{shares} | {gap.k3:.1e} | {gap.k3_replayed:.1e} | {gap.f2:.3%} | {gap.f2_replayed:.3%}"


def conditions(samples: int, warmup: int) -> str:
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in ("lockstep-rl", "torch"))
    shape = f"{MIXTURE['layers']} layers of width {MIXTURE['hidden']}, 2 of {MIXTURE['experts']} experts"
    size = f"{shape}; random: std {STD}, warmed up: {warmup} updates; {samples} prompts with {ANSWERS} answers each"
    return f"{processor()}, {os.cpu_count()} cores, float32; {versions}; {size}."
