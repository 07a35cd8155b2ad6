"""The charts of a run and what is on them; `plots` and `page` draw the same list, so a chart is added once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lockstep.report.history import History, Series

MAX_POINTS = 600  # per line: more than the pixels of a chart
NUM_COLORS = 10
PHASES = ("rollout", "learn", "wait", "sync", "eval", "save", "audit", "warm-up", "control")
"""What time goes to, as charts stack it: a phase has the same colour in every run."""
_CURVES = 3  # steps shown on the F(tau) chart: first, middle, last

_F = "F(τ) is the share of tokens to which sampler and learner give probabilities more than a factor τ apart"

Format = Literal["number", "percent", "seconds", "scientific"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    key: str  # "reward": the PNG's name
    title: str
    help: str  # one sentence for someone who sees it for the first time
    metrics: dict[str, str]  # metric or family -> label ("" for the last part of the name)
    format: Format = "number"
    log: bool = False
    stacked: bool = False


CHARTS = (
    Chart(
        key="accuracy",
        title="Held-out accuracy",
        help="Problems never trained on, answered by the model as it stands.",
        metrics={"eval/accuracy": "greedy", "eval/avg_at_k": "avg@k", "eval/pass_at_k": "pass@k"},
        format="percent",
    ),
    Chart(
        key="reward",
        title="Reward",
        help="Mean reward of the answers of each step, groups that dynamic sampling replaced included, and its parts.",
        metrics={"reward/mean": "mean", "reward/part/*": ""},
    ),
    Chart(
        key="mismatch",
        title="Sampler–learner mismatch",
        help="KL from the policy that sampled to the one that learns, estimated by k3. Rising means they drift apart.",
        metrics={"mismatch/k3": "k3"},
        format="scientific",
        log=True,
    ),
    Chart(
        key="f_over_time",
        title="Tokens that disagree",
        help=f"{_F}.",
        metrics={"mismatch/f2": "F(2)", "mismatch/f1.1": "F(1.1)", "mismatch/f10": "F(10)"},
        format="percent",
    ),
    Chart(
        key="routes",
        title="Routers that disagree",
        help="Mixtures: where the experts the sampler took are not those the learner's routers choose.",
        metrics={"routing/differ": "routers", "routing/differ_tokens": "tokens"},
        format="percent",
    ),
    Chart(
        key="experts",
        title="Load of the experts",
        help="Mixtures: how evenly tokens are spread, 1 if every expert gets as many, and how far that is from step 1.",
        metrics={"routing/load_entropy": "entropy", "routing/load_drift": "drift", "routing/unused": "unused"},
        format="percent",
    ),
    Chart(
        key="entropy",
        title="Entropy",
        help="How undecided the policy is, in nats per token. Falling fast means it stops exploring.",
        metrics={"policy/entropy": "entropy"},
    ),
    Chart(
        key="reference",
        title="Distance from the reference",
        help="KL of the policy to the model that a KL term holds it to, before each step's updates.",
        metrics={"policy/kl_ref": "k3"},
    ),
    Chart(
        key="lengths",
        title="Answer length",
        help="Sampled tokens per answer.",
        metrics={"rollout/length": "training", "eval/length": "held out"},
    ),
    Chart(
        key="truncated",
        title="Cut off by the token limit",
        help="Share of answers that ran out of room. What becomes of them is said by algorithm.truncated.",
        metrics={"rollout/truncated": "training", "eval/truncated": "held out"},
        format="percent",
    ),
    Chart(
        key="gradient",
        title="Gradient norm",
        help="Before clipping, mean over the step's updates.",
        metrics={"policy/grad_norm": "norm"},
    ),
    Chart(
        key="throughput",
        title="Throughput",
        help="Tokens per second while the engine or the learner was busy.",
        metrics={"perf/rollout_tokens_per_s": "rollout", "perf/train_tokens_per_s": "learner"},
    ),
    Chart(
        key="time",
        title="Time per step",
        help="Seconds of each step by what they were spent on.",
        metrics={"time/*": ""},
        format="seconds",
        stacked=True,
    ),
    Chart(
        key="lag",
        title="Staleness",
        help="Weight versions between sampling a token and learning from it.",
        metrics={"rollout/lag_mean": "mean", "rollout/lag_max": "largest"},
    ),
    Chart(
        key="value",
        title="Value head",
        help="Share of the returns' variance it explains.",
        metrics={"value/explained": "explained"},
    ),
    Chart(
        key="warmup",
        title="Warm-up",
        help="Loss of the supervised steps before reinforcement learning.",
        metrics={"warmup/loss": "loss"},
    ),
)


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]  # NaN leaves a gap
    color: int
    dashed: bool = False
    alpha: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A chart with its data, ready to draw."""

    chart: Chart
    lines: list[Line] = field(default_factory=list)
    x_label: str = "step"
    x_log: bool = False
    y_log: bool = False
    scatter: bool = False  # dots in the unit square, and its diagonal
    tall: bool = False

    @property
    def is_zero(self) -> bool:
        """Nothing but zeros: a sentence says as much as a drawing."""
        return all((line.y == 0).all() for line in self.lines)


def panels(runs: Sequence[History]) -> list[Panel]:
    """The charts that have data, in order. Several runs are overlaid: one line each, the chart's first metric."""
    found = [_panel(chart, runs[0]) if len(runs) == 1 else _overlay(chart, runs) for chart in CHARTS]
    after = next(i for i, chart in enumerate(CHARTS) if chart.key == "f_over_time") + 1
    found.insert(after, f_curves(runs))
    return [panel for panel in found if panel.lines]


def _panel(chart: Chart, run: History) -> Panel:
    series = _labelled(chart, run)
    if chart.stacked:
        return Panel(chart=chart, lines=_stack(series))
    lines = [_line(chart, label, s, color) for color, (label, s) in enumerate(series.items())]
    return Panel(chart=chart, lines=lines + _control(chart, run, len(lines)), y_log=_is_log(chart, lines))


def _overlay(chart: Chart, runs: Sequence[History]) -> Panel:
    if chart.stacked:
        return Panel(chart=chart)
    main, label = next(iter(chart.metrics.items()))
    lines = [_line(chart, run.name, run.series[main], i) for i, run in enumerate(runs) if main in run.series]
    if len(chart.metrics) > 1:
        chart = replace(chart, help=f"{chart.help} Of each run: {label}.")
    return Panel(chart=chart, lines=lines, y_log=_is_log(chart, lines))


def _labelled(chart: Chart, run: History) -> dict[str, Series]:
    return {
        label or name.rsplit("/", 1)[-1]: series
        for pattern, label in chart.metrics.items()
        for name, series in run.match(pattern).items()
        if name != "time/total"
    }


def _line(chart: Chart, label: str, series: Series, color: int) -> Line:
    values = np.abs(series.values) if chart.log else series.values
    thin = Series(series.steps, values).thin(MAX_POINTS)
    return Line(label, thin.steps, thin.values, color)


def _is_log(chart: Chart, lines: list[Line]) -> bool:
    """A logarithmic axis needs something finite above zero: two sides that agree exactly have nothing there."""
    return chart.log and any((np.isfinite(line.y) & (line.y > 0)).any() for line in lines)


def _control(chart: Chart, run: History, color: int) -> list[Line]:
    control = run.series.get("control/accuracy")
    if chart.key != "accuracy" or control is None:
        return []
    ends = np.array([0.0, max(float(run.num_steps), 1.0)])
    return [Line("control: supervised learning alone, same time", ends, np.full(2, control.last), color, dashed=True)]


def _stack(series: dict[str, Series]) -> list[Line]:
    """Layers on common steps, averaged over stretches of steps so that every layer is thinned alike."""
    if not series:
        return []
    steps = np.unique(np.concatenate([s.steps for s in series.values()]))
    parts = np.array_split(np.arange(len(steps)), min(len(steps), MAX_POINTS // 3))
    x = np.array([steps[part[-1]] for part in parts])
    layers = {label: _filled(s, steps) for label, s in series.items()}
    return [
        Line(label, x, np.array([layers[label][part].mean() for part in parts]), phase_color(label))
        for label in sorted(layers, key=phase_color)
        if layers[label].any()
    ]


def phase_color(name: str) -> int:
    """Also where it stands among the others; the last for what is none of them."""
    return PHASES.index(name) if name in PHASES else len(PHASES)


def _filled(series: Series, steps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Zero where it was not logged (an eval happens on some steps only) or is not finite."""
    filled = np.zeros(len(steps))
    filled[np.searchsorted(steps, series.steps)] = np.nan_to_num(series.values, nan=0.0, posinf=0.0, neginf=0.0)
    return filled


_F_CURVE = Chart(
    key="f_curve",
    title="F(τ) curve",
    help=f"{_F}; at the first, a middle and the last step.",
    metrics={"mismatch/f[0-9]*": ""},
    format="percent",
    log=True,
)


def f_curves(runs: Sequence[History]) -> Panel:
    """F over τ: several steps of one run, or the last step of each of several."""
    chart = _F_CURVE
    if len(runs) > 1:
        chart = replace(chart, help=f"{_F}; at the last step of each run.")
        curves = [(run.name, points) for run in runs if (points := _f_points(run, -1)) is not None]
        lines = [Line(label, x, y, color) for color, (label, (x, y)) in enumerate(curves)]
    else:
        curves = [(f"step {step}", points) for step, points in _f_by_step(runs[0])]
        fade = np.linspace(1.0, 0.25, len(curves))[::-1]  # the later, the stronger
        lines = [Line(label, x, y, 0, alpha=float(a)) for a, (label, (x, y)) in zip(fade, curves, strict=True)]
    return Panel(chart=chart, lines=lines, x_label="τ", x_log=True, y_log=_is_log(chart, lines))


Points = tuple[NDArray[np.float64], NDArray[np.float64]]


def _f_by_step(run: History) -> list[tuple[int, Points]]:
    family = _taus(run)
    if len(family) < 2:
        return []
    steps = next(iter(family.values())).steps
    chosen = sorted({round(i) for i in np.linspace(0, len(steps) - 1, min(_CURVES, len(steps)))})
    return [(int(steps[i]), points) for i in chosen if (points := _f_points(run, i)) is not None]


def _f_points(run: History, index: int) -> Points | None:
    family = _taus(run)
    if len(family) < 2 or len({len(series) for series in family.values()}) > 1:
        return None
    return np.array(list(family)), np.array([series.values[index] for series in family.values()])


def _taus(run: History) -> dict[float, Series]:
    """τ -> F(τ), from the metrics `mismatch/f1.1`, `mismatch/f2`, …"""
    family = {float(name.removeprefix("mismatch/f")): series for name, series in run.match("mismatch/f[0-9]*").items()}
    return {tau: family[tau] for tau in sorted(family)}
