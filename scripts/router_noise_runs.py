"""Does training survive a sampler whose routers are noisy, with replay and without? Real runs of a tiny mixture.

Noise is added to the logits by which the sampler's routers choose; their weights stay as they are, and what is recorded
is what ran. Warms a mixture up once per seed, starts every run from it, each in a process of its own, and prints how
rewards went; the curves are drawn too. Warm-ups run on CPU cores, so that they are the same wherever the runs are.

    python scripts/router_noise_runs.py --docs docs/expert-routes.md

The mixture is deep and its first layers noisy, so that about as many routers and tokens differ as in the paper: what
differs after those layers does so because its input does. Six runs take half an hour on two CPU cores, warm-ups apart.
On a GPU (`--device cuda`) many processes get on better under CUDA's MPS.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch
from matplotlib.figure import Figure
from torch import Tensor

from lockstep.assembly.recipe import Recipe
from lockstep.assembly.run import train
from lockstep.cli.benchmarks import write_into
from lockstep.cli.warm_start import continued, warmed_up
from lockstep.config.loading import validate
from lockstep.models.routes import Recording
from lockstep.report.page import write_comparison
from lockstep.report.plots import COLORS
from lockstep.report.run_folder import RunFolder

ARMS = ("off", "r3")
SHAPE = {"hidden": 64, "heads": 4, "context": 128, "experts": 8}
TASK = {"demo_steps": 1.0}  # demonstrations all show their steps: with few, not every seed finds out that they pay
WINDOW = 10  # steps of which a mean is taken
FIGURE = "images/router-noise.svg"  # beside the page


class Noisy(Recording):
    """A step of the engine whose routers choose by noisy logits, other ones whenever a CUDA graph is replayed."""

    def __init__(self, sigma: float, layers: int, *given: Any) -> None:
        """`layers`: the first ones, whose routers are noisy."""
        super().__init__(*given)
        self.decides = True
        self._sigma, self._layers = sigma, layers

    def choose(self, number: int, live: Tensor, scores: Tensor) -> Tensor:
        """`scores` are a softmax: their logarithms are the logits, up to a constant."""
        if number < self._layers:
            live = (scores.log() + self._sigma * torch.randn_like(scores)).topk(live.shape[1]).indices
        return super().choose(number, live, scores)


@contextmanager
def noisy_engines(sigma: float, layers: int, seed: int) -> Iterator[None]:
    """Every engine that is started here, in prompts and answers alike; the learner's routers hear none of it."""
    torch.manual_seed(seed)
    noisy = partial(Noisy, sigma, layers)
    with patch("lockstep.rollout.routes.Recording", noisy), patch("lockstep.rollout.burst.Recording", noisy):
        yield


@dataclass(frozen=True, slots=True)
class Run:
    noise: float
    routing: str
    seed: int

    @property
    def name(self) -> str:
        return f"noise-{self.noise:g}-{self.routing}-{self.seed}"


@dataclass(frozen=True, slots=True)
class Outcome:
    run: Run
    metrics: list[dict[str, float]]  # of every step

    def series(self, name: str) -> list[float]:
        return [row[name] for row in self.metrics if name in row]

    @property
    def rewards(self) -> list[float]:
        return self.series("reward/mean")

    @property
    def smooth(self) -> list[float]:
        """Means of the last steps, from when there are enough."""
        return [fmean(self.rewards[i - WINDOW : i]) for i in range(WINDOW, len(self.rewards) + 1)]


def warm_up(root: Path, given: argparse.Namespace, seed: int) -> Path:
    torch.set_num_threads(1)
    folder = RunFolder(root / f"warm-{seed}")
    return folder.result or warmed_up(folder.root, SHAPE | {"layers": given.layers}, given.warmup, seed, TASK)


def start(root: Path, given: argparse.Namespace, run: Run, warm: Path) -> Outcome:
    """In a process of its own, because all engines in it are noisy. A run that is there already is only read."""
    torch.set_num_threads(1)
    changes = {
        "name": run.name,
        "seed": run.seed,
        "device": given.device,
        "train": {"steps": given.steps, "prompts": given.prompts},
        "algorithm": {"correction": "none"},
        "rollout": {"max_seqs": 128},  # all answers of a step, and no more graphs than they need
        "learner": {
            "routing": run.routing,
            "learning_rate": given.rate,
            "mini_steps": given.updates,
            "dtype": "float32",  # so that noise is all that sampler and learner differ by
        },
        "governor": {"mode": "off"},
        "record": {"samples_per_step": 1},
    }
    recipe = validate(Recipe, continued(warm, changes), run.name)
    folder = RunFolder(root / run.name)
    if not folder.report.exists():
        with noisy_engines(run.noise, given.noisy, run.seed):
            train(recipe, folder.root, plain=True)
    return Outcome(run, list(folder.read_metrics()))


def table(outcomes: Sequence[Outcome]) -> str:
    lines = [
        "| noise | routers differ | tokens | `learner.routing` | seed | k3 | first steps | best | last steps |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for o in outcomes:
        shares = (f"{fmean(o.series(name)):.0%}" for name in ("routing/differ", "routing/differ_tokens"))
        rewards = (f"{value:.2f}" for value in (o.smooth[0], max(o.smooth), o.smooth[-1]))
        k3 = f"{fmean(o.series('mismatch/k3')):.1e}"
        cells = (f"{o.run.noise:g}", *shares, f"`{o.run.routing}`", o.run.seed, k3, *rewards)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def summary(outcomes: Sequence[Outcome]) -> str:
    lines = []
    for noise in sorted({o.run.noise for o in outcomes}):
        ends = {arm: [o.smooth[-1] for o in outcomes if o.run.noise == noise and o.run.routing == arm] for arm in ARMS}
        words = ", ".join(f"{fmean(last):.2f} with `{arm}`" for arm, last in ends.items() if last)
        lines.append(f"Noise {noise:g}: mean reward of the last {WINDOW} steps over seeds {words}.")
    return "\n".join(lines)


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    noises = sorted({o.run.noise for o in outcomes})
    figure = Figure(figsize=(4.2 * len(noises), 3.2), layout="constrained")
    for axes, noise in zip(figure.subplots(1, len(noises), sharey=True, squeeze=False)[0], noises, strict=True):
        here = [o for o in outcomes if o.run.noise == noise]
        for color, arm in zip(COLORS, ARMS, strict=False):
            curves = [o.smooth for o in here if o.run.routing == arm]
            for curve in curves:
                axes.plot(range(WINDOW, WINDOW + len(curve)), curve, color=color, linewidth=0.8, alpha=0.5)
            if curves:
                mean = [fmean(values) for values in zip(*curves, strict=True)]
                axes.plot(range(WINDOW, WINDOW + len(mean)), mean, color=color, linewidth=2.2, label=arm)
        plain = [o for o in here if o.run.routing == "off"]  # replay hides what follows from what it replays
        differ = fmean(fmean(o.series("routing/differ")) for o in plain)
        axes.set_title(f"{differ:.0%} of routers differ", loc="left", fontsize=10)
        axes.set_xlabel("step")
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel(f"reward, mean of {WINDOW} steps")
    figure.axes[0].legend(title="learner.routing", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/router-noise"), help="folder for the runs; those in it are kept"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time, one core each")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu", help="of the runs: all on one")
    parser.add_argument("--layers", type=int, default=28, help="of the mixture, all with experts")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--noise", type=float, nargs="+", default=[1.0], help="standard deviations, of logits")
    parser.add_argument("--noisy", type=int, default=2, help="layers with noise, from the first on")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=12, help="of a step; eight answers to each")
    parser.add_argument("--warmup", type=int, default=400, help="supervised updates before them")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--updates", type=int, default=1, help="per step")
    parser.add_argument("--docs", type=Path, help="page whose table is replaced; the figure goes beside it")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    runs = [Run(noise, arm, seed) for noise, arm, seed in product(given.noise, ARMS, given.seeds)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, mp_context=context, max_tasks_per_child=1) as pool:
        warm = dict(zip(given.seeds, pool.map(partial(warm_up, given.out, given), given.seeds), strict=True))
        futures = [pool.submit(start, given.out, given, run, warm[run.seed]) for run in runs]
        outcomes = [future.result() for future in futures]
    write_comparison([RunFolder.open(given.out / run.name) for run in runs], given.out / "comparison.html")
    text = f"{table(outcomes)}\n\n{summary(outcomes)}"
    print(text)
    draw(outcomes, given.docs.parent / FIGURE if given.docs else given.out / "rewards.svg")
    if given.docs:
        curves = f"![Reward over steps; thin lines are seeds, thick ones their means]({FIGURE})"
        write_into(given.docs, f"{curves}\n\n{text}", "noise")


if __name__ == "__main__":
    main()
