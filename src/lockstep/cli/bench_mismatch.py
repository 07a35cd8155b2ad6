"""`lockstep bench mismatch`: how far a low-bit sampler and its learner are apart, aligned and not; what a sync costs.

A dense model and a mixture are warmed up once each, so that their distributions are as peaked as a trained model's; a
third, `long`, is drawn with weights so large that its are, and answers with hundreds of tokens. From there every format
makes the same few RL steps with a high-precision learner, with an aligned one and, on a GPU, exactly; the gap is read
off the metrics of the steps that follow an update. Syncs are timed apart, on larger models.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.status import Status

from lockstep import __version__
from lockstep.assembly.devices import choose_device
from lockstep.assembly.recipe import Recipe
from lockstep.assembly.roles import Training, load_model
from lockstep.cli.bench_rollout import known
from lockstep.cli.benchmarks import processor, write_into
from lockstep.cli.warm_start import continued, drawn, warmed_up
from lockstep.config import choices
from lockstep.config.loading import validate
from lockstep.quant.ladder import batch_invariant
from lockstep.report.recorder import Recorders
from lockstep.rollout.config import RolloutConfig

HIGH = "high"
KEYS_AND_VALUES = "high, keys and values fp8"
VARIANTS = ({"name": "fp8_w8a8", "block": True}, {"name": "w4a8", "inputs": "fp8"})
MODELS = {"dense": {"experts": 0}, "mixture": {"experts": 8}}
SMALL = {"hidden": 128, "layers": 2, "heads": 4, "context": 128}  # what is trained
LONG = {"hidden": 512, "layers": 8, "heads": 4, "context": 1024, "experts": 0}
LONG_STD, LONG_ANSWER = 0.06, 600  # of its weights; tokens
LARGE = {"hidden": 512, "layers": 4, "heads": 8, "context": 64}  # what is synced: copying must outweigh calling
PROMPTS, ANSWERS = 8, 8  # per step, and to each prompt: some 1,700 tokens
SYNCS = 10

Precision = str | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Gap:
    """Between sampler and learner, over the steps that follow an update."""

    k3: float  # mean
    f2: float  # mean
    w_max: float  # of all

    @property
    def in_words(self) -> str:
        return f"k3 {self.k3:.1e}, F(2) {self.f2:.2%}, max w {self.w_max:.4g}"


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    precision: str
    unaligned: Gap  # the learner in high precision
    aligned: Gap | None = None  # None where there is nothing to align: high precision, or keys and values
    exact: Gap | None = None  # None where that is not to be had


@dataclass(frozen=True, slots=True)
class Sync:
    model: str
    precision: str
    mib: float  # published
    quantize_ms: float  # once per update, before
    copied_ms: float  # learner -> store -> engine
    shared_ms: float


@dataclass(frozen=True, slots=True)
class Bench:
    """What is measured, and where."""

    models: Sequence[str]
    device: torch.device
    steps: int  # after the first update, per line
    warmup: int
    float32_logits: bool
    console: Console

    def gaps(self) -> Iterator[Row]:
        with TemporaryDirectory() as folder:
            for model in self.models:
                start = self._start(Path(folder), model)
                sizes = {"max_tokens": LONG_ANSWER, "kv_gib": 2} if model == "long" else {"kv_gib": 0.25}
                gap = partial(self._gap, start, sizes)
                yield Row(model, HIGH, gap(HIGH, "none"))
                yield Row(model, KEYS_AND_VALUES, gap(HIGH, "none", kv="fp8"))
                for precision in precisions():
                    unaligned, aligned = (gap(precision, how) for how in ("none", "aligned"))
                    exactly = self.device.type == "cuda" and model != "mixture" and _batch_invariant(precision)
                    exact = gap(precision, "aligned", exact=True) if exactly else None
                    yield Row(model, in_words(precision), unaligned, aligned, exact)

    def _start(self, folder: Path, model: str) -> Path:
        """The checkpoint that every line begins with."""
        if model == "long":
            self.console.print("long: random weights", highlight=False)
            return drawn(folder / model, LONG, LONG_STD)
        self.console.print(f"{model}: warming up", highlight=False)
        return warmed_up(folder / model, SMALL | MODELS[model], self.warmup, device=self.device.type)

    def _gap(
        self,
        start: Path,
        sizes: Mapping[str, float],
        precision: Precision,
        alignment: str,
        kv: str = "high",
        exact: bool = False,
    ) -> Gap:
        rollout = {"precision": precision, "kv_precision": kv, "exact": exact, "max_seqs": PROMPTS * ANSWERS}
        changes = {
            "device": self.device.type,
            "train": {"steps": self.steps + 1, "prompts": PROMPTS, "group_size": ANSWERS},  # one is before any update
            "rollout": {**rollout, **sizes},
            "learner": {"alignment": alignment},
        }
        tables = continued(start, changes)
        tables["model"]["float32_logits"] = self.float32_logits
        sampler = KEYS_AND_VALUES if kv == "fp8" else in_words(precision)
        pair = f"  {sampler}, learner {'exact' if exact else alignment}"
        began = time.monotonic()
        with self.console.status(pair) as status:
            tell = partial(self._tell_step, status, pair)
            rows = asyncio.run(_reinforce(_recipe(tables), tell))[1:]
        gap = Gap(
            k3=fmean(row["mismatch/k3"] for row in rows),
            f2=fmean(row["mismatch/f2"] for row in rows),
            w_max=max(row["mismatch/w_max"] for row in rows),
        )
        took = f"{time.monotonic() - began:.1f} s"
        self.console.print(f"{pair}: {gap.in_words} ({took})", highlight=False, soft_wrap=True)
        return gap

    def _tell_step(self, status: Status, pair: str, version: int) -> None:
        status.update(f"{pair}: step {version + 1} of {self.steps + 1}")

    @property
    def mark(self) -> str:
        """Of the place in a page that has these tables."""
        parts = ["measured", *(["cuda"] if self.device.type == "cuda" else [])]
        return ", ".join([*parts, *(["float32 logits"] if self.float32_logits else [])])

    def conditions(self) -> str:
        """Machine, versions and size of the measurement, in one line."""
        if self.device.type == "cpu":
            where = f"{processor()}, {os.cpu_count()} cores, float32"
        else:
            where = f"{torch.cuda.get_device_name(self.device)}, bfloat16"
        after = f"then {self.steps} step{'s' * (self.steps > 1)} after the first update per line"
        where += ", logits in float32" * self.float32_logits
        versions = f"lockstep {__version__}, torch {torch.__version__}"
        warmup = f"{self.warmup} update{'s' * (self.warmup > 1)} of warm-up"
        if "long" in self.models:
            warmup = "random weights" if len(self.models) == 1 else f"{warmup} (long: random weights)"
        return f"{where}; {versions}; {warmup}, {after}."


def compare(
    models: Sequence[str],
    *,
    device: str,
    steps: int,
    warmup: int,
    float32_logits: bool,
    out: Path | None,
    json_out: Path | None,
    console: Console,
) -> None:
    known("model", models, [*MODELS, "long"])
    bench = Bench(tuple(dict.fromkeys(models or MODELS)), choose_device(device), steps, warmup, float32_logits, console)
    console.print(bench.conditions(), highlight=False, soft_wrap=True)
    gaps = list(bench.gaps())
    synced = [model for model in bench.models if model in MODELS]
    syncs = list(_syncs(synced, console)) if bench.device.type == "cpu" else []  # a GPU has `bench sync`
    text = "\n\n".join([bench.conditions(), gap_table(gaps), *([sync_table(syncs)] if syncs else [])])
    console.print(f"\n{text}", markup=False, highlight=False, soft_wrap=True)
    if json_out is not None:
        kept = {"conditions": bench.conditions(), "gaps": [*map(asdict, gaps)], "syncs": [*map(asdict, syncs)]}
        json_out.write_text(json.dumps(kept, indent=2) + "\n")
    if out is not None:
        write_into(out, text, bench.mark)


def precisions() -> list[Precision]:
    """Every format, and the variants of some."""
    return [*choices("lockstep.quant.formats"), *VARIANTS]


def in_words(precision: Precision) -> str:
    """`fp8_w8a8`, `fp8_w8a8 block=True`."""
    if isinstance(precision, str):
        return precision
    return " ".join([precision["name"], *(f"{key}={value}" for key, value in precision.items() if key != "name")])


def _batch_invariant(precision: Precision) -> bool:
    return batch_invariant(validate(RolloutConfig, {"precision": precision}, "bench mismatch").precision)


def _recipe(tables: Mapping[str, Any]) -> Recipe:
    return validate(Recipe, tables, "bench mismatch")


async def _reinforce(recipe: Recipe, tell: Callable[[int], None]) -> list[Mapping[str, float]]:
    """The metrics of every step, each told of as it begins."""
    async with _started(recipe) as roles:
        rows = []
        for version in range(recipe.train.steps):
            tell(version)
            rows.append(await _step(roles, recipe.train.prompts, version))
        return rows


@asynccontextmanager
async def _started(recipe: Recipe) -> AsyncIterator[Training]:
    roles = Training(recipe, load_model(recipe), Recorders([]))
    try:
        await _sync(roles, 0)
        yield roles
    finally:
        await roles.close()


async def _step(roles: Training, prompts: int, version: int) -> Mapping[str, float]:
    indices = range(version * prompts, (version + 1) * prompts)
    await asyncio.gather(*(roles.rollout.run(index, roles.prompts(index), version) for index in indices))
    result = await roles.learner.step(version, _arrived(indices))
    await roles.engine.update_weights(result.version)
    return result.metrics


async def _arrived(indices: Iterable[int]) -> AsyncIterator[int]:
    for index in indices:
        yield index


async def _sync(roles: Training, version: int) -> float:
    """Seconds from the learner's finished weights to the engine's."""
    began = time.perf_counter()
    await roles.learner.publish(version)
    await roles.engine.update_weights(version)
    return time.perf_counter() - began


def _syncs(models: Sequence[str], console: Console) -> Iterator[Sync]:
    for model in models:
        for precision in (HIGH, *precisions()):
            mib, quantize, copied = asyncio.run(_time_sync(precision, LARGE | MODELS[model], max_staleness=1))
            shared = asyncio.run(_time_sync(precision, LARGE | MODELS[model], max_staleness=0))[2]
            yield Sync(model, in_words(precision), mib, 1e3 * quantize, 1e3 * copied, 1e3 * shared)
            line = f"sync of {model}, {in_words(precision)}: {mib:.1f} MiB in {1e3 * copied:.1f} ms"
            console.print(line, highlight=False)


async def _time_sync(precision: Precision, shape: Mapping[str, int], max_staleness: int) -> tuple[float, float, float]:
    """MiB, and the median seconds of quantizing and of syncing. Sampling ahead, the engine has buffers of its own."""
    tables = {
        "device": "cpu",
        "model": {"init": shape},
        "task": "arithmetic",
        "algorithm": {"surrogate": "grpo"},
        "train": {"steps": 1, "max_staleness": max_staleness},
        "rollout": {"precision": precision, "max_seqs": 1},
    }
    async with _started(_recipe(tables)) as roles:
        num_bytes = sum(tensor.nbytes for tensor in roles.core.published().values())
        syncs = [await _sync(roles, version) for version in range(1, SYNCS + 1)]
        return num_bytes / 2**20, median(_time_quantize(roles) for _ in range(3)), median(syncs)


def _time_quantize(roles: Training) -> float:
    began = time.perf_counter()
    if roles.low_bit is not None:
        roles.low_bit.refresh(dict(roles.core.updater.masters.named_parameters()))
    return time.perf_counter() - began


def gap_table(rows: Sequence[Row]) -> str:
    """Markdown. How they fare exactly is told where some do."""
    exactly = any(row.exact for row in rows)
    header = "| model | sampler | learner high: k3 | F(2) | max w | aligned: k3 | F(2) | max w | k3, high / aligned |"
    lines = [f"{header} exact: k3 | max w |" if exactly else header, "|---" * (11 if exactly else 9) + "|"]
    for row in rows:
        ratio = f"{row.unaligned.k3 / max(row.aligned.k3, 1e-16):.0e}" if row.aligned else "–"
        line = f"| {row.model} | `{row.precision}` | {_cells(row.unaligned)} | {_cells(row.aligned)} | {ratio} |"
        exact = f" {row.exact.k3:.1e} | {row.exact.w_max:.4g} |" if row.exact else " – | – |"
        lines.append(line + exact if exactly else line)
    return "\n".join(lines)


def _cells(gap: Gap | None) -> str:
    return f"{gap.k3:.1e} | {gap.f2:.2%} | {gap.w_max:.4g}" if gap else "– | – | –"


def sync_table(syncs: Sequence[Sync]) -> str:
    """Markdown; bytes also as a share of the same model's in high precision."""
    high = {sync.model: sync.mib for sync in syncs if sync.precision == HIGH}
    lines = [
        "| model | sampler | published, MiB | of high | quantize, ms | sync, copied, ms | sync, shared, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {s.model} | `{s.precision}` | {s.mib:.1f} | {s.mib / high[s.model]:.0%} | {s.quantize_ms:.1f} "
        f"| {s.copied_ms:.1f} | {s.shared_ms:.1f} |"
        for s in syncs
    ]
    return "\n".join(lines)
