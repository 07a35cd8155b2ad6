"""`lockstep bench routing`: what replay does to the gap between a low-bit sampler and its learner.

A tiny mixture is warmed up once. Every format then samples answers from it, and the same tokens are scored with and
without the sampler's experts, by a learner in high precision and by an aligned one.
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
from lockstep.cli.warm_start import MIXTURE, continued, warmed_up
from lockstep.config.loading import validate

HIGH = "high"
NAME = "gap"  # of its place on the page
ANSWERS = 4  # to each prompt


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
        console.print("a tiny mixture: warming up", highlight=False)
        start = warmed_up(Path(folder) / "mixture", MIXTURE, warmup)
        yield Row(HIGH, _gap(start, HIGH, "none", samples, console), None)
        for precision in precisions():
            apart, aligned = (_gap(start, precision, how, samples, console) for how in ("none", "aligned"))
            yield Row(in_words(precision), apart, aligned)


def _gap(start: Path, precision: Precision, alignment: str, samples: int, console: Console) -> Gap:
    changes = {"rollout": {"precision": precision}, "learner": {"alignment": alignment}}
    recipe = validate(Recipe, continued(start, changes), "bench routing")
    prompts = [sample.messages for sample in recipe.task.build().samples("eval")[:samples]]
    began = time.monotonic()
    found = asyncio.run(
        study(
            recipe, load_model(recipe), prompts, name="", answers=ANSWERS, tell=lambda *_: None, checkpoint=str(start)
        )
    )
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
    lines = [
        "| sampler | learner | routers differ | tokens | k3, live | k3, replayed | F(2), live | F(2), replayed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(f"| `{row.precision}` | high | {_cells(row.apart)} |")
        lines += [f"| `{row.precision}` | aligned | {_cells(row.aligned)} |"] if row.aligned else []
    return "\n".join(lines)


def _cells(gap: Gap) -> str:
    shares = f"{gap.differ:.2%} | {gap.differ_tokens:.1%}"
    return f"{shares} | {gap.k3:.1e} | {gap.k3_replayed:.1e} | {gap.f2:.3%} | {gap.f2_replayed:.3%}"


def conditions(samples: int, warmup: int) -> str:
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in ("lockstep-rl", "torch"))
    shape = f"{MIXTURE['layers']} layers of width {MIXTURE['hidden']}, 2 of {MIXTURE['experts']} experts"
    size = f"{shape}; {warmup} updates of warm-up, {samples} prompts with {ANSWERS} answers each"
    return f"{processor()}, {os.cpu_count()} cores, float32; {versions}; {size}."
