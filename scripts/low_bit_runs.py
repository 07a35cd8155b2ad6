"""What does low-bit sampling do to a real model that learns? The same training in 16, 8 and 4 bits, on one GPU.

    python scripts/low_bit_runs.py --model HuggingFaceTB/SmolLM2-135M-Instruct

Trains `examples/word_sums.toml` with a sampler in 16, 8 and 4 bits, and learners that are apart from it (uncorrected,
and corrected by TIS), aligned, and exact. Runs are processes of their own, a few at a time, which get on better under
CUDA's MPS; one that is there already is only read. Prints a table and draws the curves.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lockstep.cli import STOPPED
from lockstep.cli.benchmarks import write_into
from lockstep.report.page import write_comparison
from lockstep.report.plots import COLORS
from lockstep.report.run_folder import RunFolder

EXAMPLES = Path(__file__).parents[1] / "examples"
FIGURE = "images/low-bit-runs.svg"  # in docs
HIGH, FORMATS = "high", ("int8_w8a8", "w4a8")
LEARNERS = {
    "apart": ("learner.alignment=none", "algorithm.correction=none"),
    "apart, TIS": ("learner.alignment=none",),
    "aligned": (),
    "exact": ("rollout.exact=true",),
}
WINDOW = 10  # steps, of which a mean is taken


@dataclass(frozen=True, slots=True)
class Run:
    precision: str
    learner: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.precision}-{self.learner}-{self.seed}".replace(", ", "-").lower()

    @property
    def overrides(self) -> tuple[str, ...]:
        return (f"rollout.precision={self.precision}", *LEARNERS.get(self.learner, ()))


@dataclass(frozen=True, slots=True)
class Outcome:
    run: Run
    metrics: Sequence[dict[str, Any]]
    alarms: Sequence[int]  # steps at whose end the governor spoke

    def series(self, name: str) -> list[tuple[int, float]]:
        return [(row["step"], row[name]) for row in self.metrics if name in row]

    def values(self, name: str) -> list[float]:
        return [value for _, value in self.series(name)]

    def smooth(self, name: str) -> list[tuple[int, float]]:
        found = self.series(name)
        return [(found[i - 1][0], fmean(v for _, v in found[i - WINDOW : i])) for i in range(WINDOW, len(found) + 1)]


def start(root: Path, given: argparse.Namespace, run: Run) -> Outcome:
    folder = RunFolder(root / run.name)
    if not ended(folder, given.steps):
        command = [sys.executable, "-m", "lockstep", "train", "word_sums.toml", f"name={run.name}", *run.overrides]
        command += [f"model.path={given.model}", f"train.steps={given.steps}", f"seed={run.seed}", *given.overrides]
        done = subprocess.run([*command, "--plain", "--runs", str(root)], cwd=EXAMPLES, capture_output=True, text=True)
        print(f"{run.name}: ended with {done.returncode}", flush=True)
        if done.returncode not in (0, STOPPED):
            raise RuntimeError(f"{' '.join(command)}:\n{done.stdout[-500:]}\n{done.stderr[-2000:]}")
    alarms = [row["step"] for row in folder.read_events() if row["kind"] == "governor"]
    return Outcome(run, list(folder.read_metrics()), alarms)


def ended(folder: RunFolder, steps: int) -> bool:
    """As it was meant to, or stopped on request."""
    if not folder.report.exists():
        return False
    stopped = any(row["kind"] == "stopped" for row in folder.read_events())
    return stopped or any(row["step"] == steps and "reward/mean" in row for row in folder.read_metrics())


def table(outcomes: Sequence[Outcome]) -> str:
    common = max(set.intersection(*({step for step, _ in o.series("eval/accuracy")} for o in outcomes)))
    lines = [
        f"| sampler | learner | accuracy before | at step {common} | last (step) | steps | reward, last {WINDOW} steps "
        "| k3 | F(2) | max w | governor |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for o in outcomes:
        accuracy = dict(o.series("eval/accuracy"))
        last = max(accuracy)
        shares = (f"{accuracy[0]:.1%}", f"{accuracy[common]:.1%}", f"{accuracy[last]:.1%} ({last})")
        rewards = o.values("reward/mean")
        gap = (f"{fmean(o.values('mismatch/k3')):.1e}", f"{fmean(o.values('mismatch/f2')):.2%}")
        largest = f"{max(o.values('mismatch/w_max')):.3g}"
        spoke = f"from step {min(o.alarms)} on" if o.alarms else "silent"
        cells = (*shares, len(rewards), f"{fmean(rewards[-WINDOW:]):.2f}", *gap, largest, spoke)
        lines.append(f"| `{o.run.precision}` | {o.run.learner} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def draw(outcomes: Sequence[Outcome], formats: Sequence[str], path: Path) -> None:
    """Accuracy above, the gap below; a column for each format, with 16 bits in all of them for comparison."""
    figure = Figure(figsize=(4.6 * len(formats), 5.6), layout="constrained")
    rows = figure.subplots(2, len(formats), sharex=True, sharey="row", squeeze=False)
    for column, precision in enumerate(formats):
        shown = [o for o in outcomes if o.run.precision in (HIGH, precision)]
        curves(rows[0][column], shown, lambda o: o.series("eval/accuracy"))
        curves(rows[1][column], shown, lambda o: [point for point in o.smooth("mismatch/k3") if point[1] > 0])
        rows[0][column].set_title(precision, loc="left", fontsize=10)
        rows[0][column].set_ylim(bottom=0)
        rows[1][column].set_yscale("log")
        rows[1][column].set_xlabel("step")
    rows[0][0].set_ylabel("held-out accuracy")
    rows[1][0].set_ylabel(f"k3, mean of {WINDOW} steps")
    rows[0][-1].legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def curves(axes: Axes, outcomes: Sequence[Outcome], points: Callable[[Outcome], Sequence[tuple[int, float]]]) -> None:
    for color, o in zip(COLORS, outcomes, strict=False):
        found = points(o)
        axes.plot([step for step, _ in found], [value for _, value in found], color=color, label=o.run.learner)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder or a hub name")
    parser.add_argument("--out", type=Path, default=Path("runs/low-bit"), help="folder for the runs, which are kept")
    parser.add_argument("--jobs", type=int, default=5, help="runs at a time")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", action="append", choices=FORMATS, help="beside 16 bits; default: all of them")
    parser.add_argument("--docs", type=Path, help="page in docs/benchmarks whose table and figure are replaced")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="keys of the recipe, for every run")
    return parser.parse_intermixed_args()


def main() -> None:
    given = arguments()
    root, formats = given.out.resolve(), given.format or FORMATS
    if Path(given.model).is_dir():
        given.model = Path(given.model).resolve()  # runs start in examples
    low = (Run(precision, learner, given.seed) for precision in formats for learner in LEARNERS)
    chosen = [Run(HIGH, "bfloat16", given.seed), *low]
    with ThreadPoolExecutor(given.jobs) as pool:
        outcomes = list(pool.map(lambda run: start(root, given, run), chosen))
    write_comparison([RunFolder.open(root / run.name) for run in chosen], root / "comparison.html")
    text = table(outcomes)
    print(text)
    draw(outcomes, formats, given.docs.resolve().parents[1] / FIGURE if given.docs else root / "curves.svg")
    if given.docs:
        write_into(given.docs, f"![Accuracy and mismatch over steps](../{FIGURE})\n\n{text}", "runs")


if __name__ == "__main__":
    main()
