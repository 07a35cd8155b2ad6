"""Does the governor name a collapse before it happens, and is it silent otherwise? Real runs of the tiny model.

Warms a model up once per seed, starts every run from it, each in a process of its own on one core, and prints when
the governor spoke and when the reward halved. About five minutes on 16 cores:

    python scripts/governor_runs.py --jobs 16 --docs docs/governor.md
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from lockstep.assembly.recipe import Recipe
from lockstep.cli.recipe_files import find
from lockstep.cli.training import to_toml
from lockstep.config import load

RATE = 5e-4  # the quickstart's
ALIVE = 0.5  # share of its best reward that a run ends with, at least, if it is alive
LEAD = 5  # steps between the first alarm and the reward's halving, at least
BEGIN, END = "<!-- runs: begin -->", "<!-- runs: end -->"


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run changes of the quickstart."""

    name: str
    overrides: tuple[str, ...]
    collapses: bool = False


def settings(coarse: Sequence[str], too_high: float) -> list[Setting]:
    presets = sorted(path.stem for path in (Path(__file__).parents[1] / "src/lockstep/presets").glob("*.toml"))
    collapse = (f"learner.learning_rate={too_high}", "algorithm.correction=none", *coarse)
    return [
        *(Setting(f"preset {name}", (f"preset={name}",)) for name in presets),
        Setting("coarse rollout, tis", tuple(coarse)),
        Setting("staleness 2, tis", ("train.max_staleness=2",)),
        Setting("collapse, advisory", (*collapse, "governor.mode=advisory"), collapses=True),
        Setting("collapse, active", (*collapse, "governor.mode=active"), collapses=True),
    ]


@dataclass(frozen=True, slots=True)
class Outcome:
    setting: Setting
    seed: int
    rewards: list[float]
    alarms: list[tuple[int, str]] = field(default_factory=list)  # step, what it said

    @property
    def halved(self) -> int | None:
        """The first step at which the reward is below half of its best before, both as means over 3 steps."""
        means = [fmean(self.rewards[max(0, step - 3) : step]) for step in range(1, len(self.rewards) + 1)]
        return next((step for step in range(4, len(means) + 1) if means[step - 1] < max(means[: step - 1]) / 2), None)

    @property
    def last(self) -> float:
        return fmean(self.rewards[-5:])

    @property
    def alive(self) -> bool:
        return self.last >= ALIVE * max(self.rewards)

    @property
    def lead(self) -> int | None:
        return self.halved - self.alarms[0][0] if self.halved and self.alarms else None


def lockstep(root: Path, *arguments: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lockstep", "train", *arguments, "device=cpu", "--plain", "--runs", str(root)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")


def warm_up(root: Path, seed: int, updates: int) -> Path:
    """A recipe that starts where the quickstart's warm-up ends."""
    name = f"warm-{seed}"
    supervised = ("train.steps=0", f"warmup.steps={updates}", "warmup.control=false", "eval.samples=0")
    lockstep(root, "quickstart", f"name={name}", f"seed={seed}", *supervised)
    tables = tomllib.loads(find("quickstart").read_text())
    del tables["warmup"]
    tables |= {"seed": seed, "eval": {"samples": 0}, "record": {"samples_per_step": 1}}
    tables["model"] = {"path": str((root / name / "checkpoints/step-000000").resolve())}
    recipe = root / f"{name}.toml"
    recipe.write_text(to_toml(tables))
    return recipe


def run(root: Path, recipe: Path, setting: Setting, seed: int, steps: int) -> Outcome:
    name = f"{setting.name.replace(', ', '-').replace(' ', '-')}-{seed}"
    overrides = [f"name={name}", f"train.steps={steps}", *setting.overrides]
    if not any("learning_rate" in override for override in overrides):
        updates = load(Recipe, recipe, overrides).learner.num_updates
        overrides.append(f"learner.learning_rate={RATE / updates}")  # as far in a step as with one update
    lockstep(root, str(recipe), *overrides)
    rows = list(read(root / name / "metrics.jsonl"))
    alarms = [(row["step"], row["text"]) for row in read(root / name / "events.jsonl") if row["kind"] == "governor"]
    print(f"{name}: done", flush=True)
    return Outcome(setting, seed, [row["reward/mean"] for row in rows if "reward/mean" in row], alarms)


def read(path: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, path.read_text().splitlines())


def table(outcomes: Sequence[Outcome]) -> str:
    lines = [
        "| run | seed | best reward | last 5 steps | reward halved | first alarm | lead | alarms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for o in outcomes:
        first = o.alarms[0][0] if o.alarms else "–"
        said = ", ".join(f"{text.partition(':')[0]} {step}" for step, text in o.alarms) or "none"
        cells = (
            o.setting.name,
            o.seed,
            f"{max(o.rewards):.2f}",
            f"{o.last:.2f}",
            o.halved or "–",
            first,
            o.lead or "–",
            said,
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def summary(outcomes: Sequence[Outcome]) -> str:
    healthy = [o for o in outcomes if not o.setting.collapses]
    advised = [o for o in outcomes if o.setting.name == "collapse, advisory"]
    active = [o for o in outcomes if o.setting.name == "collapse, active"]
    named = sum(o.lead is not None and o.lead >= LEAD for o in advised)
    return (
        f"Healthy runs with an alarm: {sum(bool(o.alarms) for o in healthy)} of {len(healthy)}. "
        f"Collapses named {LEAD} steps or more before the reward halved: {named} of {len(advised)}. "
        f"Alive at the end under an active governor: {sum(o.alive for o in active)} of {len(active)}, "
        f"under an advisory one: {sum(o.alive for o in advised)} of {len(advised)}."
    )


def write_into(docs: Path, text: str) -> None:
    before, _, rest = docs.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    docs.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/governor"), help="folder for the runs; must be new")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time, one core each")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[3, 4, 5], help="the shipped rules were tuned on 0 to 2"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=600, help="supervised updates before them")
    parser.add_argument(
        "--coarse",
        nargs="*",
        default=["rollout.precision=w4a16", "learner.alignment=none"],
        help="what makes sampling coarse",
    )
    parser.add_argument("--rate", type=float, default=6e-3, help="the learning rate that is too high")
    parser.add_argument("--only", default="", help="settings whose name holds this word")
    parser.add_argument("--docs", type=Path, help="page whose table is replaced")
    given = parser.parse_args()
    chosen = [setting for setting in settings(given.coarse, given.rate) if given.only in setting.name]
    with ThreadPoolExecutor(given.jobs) as pool:
        warm = pool.map(lambda seed: warm_up(given.out, seed, given.warmup), given.seeds)
        recipes = dict(zip(given.seeds, warm, strict=True))
        runs = [
            pool.submit(run, given.out, recipes[seed], setting, seed, given.steps)
            for setting in chosen
            for seed in given.seeds
        ]
        outcomes = [future.result() for future in runs]
    text = f"{table(outcomes)}\n\n{summary(outcomes)}"
    print(text)
    if given.docs:
        write_into(given.docs, text)


if __name__ == "__main__":
    main()
