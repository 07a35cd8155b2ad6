"""The sections of a report page as HTML. Every text of the run goes through `escape`."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.report.charts import NUM_COLORS, Panel, phase_color
from lockstep.report.health import Reading, readings
from lockstep.report.history import History, Series
from lockstep.report.jsonl import Row

_SHOWN_EVENTS = 200


def escape(value: object) -> str:
    return html.escape(str(value))


def number(value: float | None, digits: int = 4) -> str:
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1e3:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def percent(value: float) -> str:
    return f"{100 * value:.1f}%" if math.isfinite(value) else str(value)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    if minutes:
        return f"{minutes} min {rest:02d} s"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"


def count(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"


def header(run: History) -> str:
    env = run.environment
    facts = [env.get("created"), env.get("device"), env.get("lockstep") and f"Lockstep {env['lockstep']}"]
    flags = [reading for reading in readings(run) if reading.flag]
    verdict = _verdict(flags) if run.series else ""
    return (
        f'<header><p class="eyebrow">Lockstep run</p><h1>{escape(run.name)}</h1>'
        f"{_spans('subject', subject(run.config))}{_spans('facts', facts)}{verdict}</header>"
    )


def _spans(kind: str, texts: Iterable[object]) -> str:
    shown = "".join(f"<span>{escape(text)}</span>" for text in texts if text)
    return f'<p class="{kind}">{shown}</p>' if shown else ""


def subject(config: Mapping[str, Any]) -> list[str]:
    """What is trained, on what and how, as far as the config says: task, method, model, precision of the sampler."""
    model, algorithm, rollout = (config.get(table) or {} for table in ("model", "algorithm", "rollout"))
    methods = [*_names(algorithm.get("surrogate")), *_names(algorithm.get("correction"))]
    method = " + ".join(name for name in methods if name != "none")
    low_bit = [f"sampled in {name}" for name in _names(rollout.get("precision"))]
    return [*_names(config.get("task")), method, _model(model), *low_bit]


def _names(choice: object) -> list[str]:
    """Of plug-ins as a config writes them: a name, a table with one, a list of these, or nothing."""
    if isinstance(choice, Mapping):
        return _names(choice.get("name"))
    if isinstance(choice, Sequence) and not isinstance(choice, str):
        return [name for one in choice for name in _names(one)]
    return [choice] if isinstance(choice, str) else []


def _model(model: Mapping[str, Any]) -> str:
    shape = model.get("init")
    if not shape:
        return str(model.get("path", ""))
    kind = f"tiny Qwen3 with {shape['experts']} experts" if shape.get("experts") else "tiny Qwen3"
    sizes = [f"{shape[key]} {word}" for key, word in (("layers", "layers"), ("hidden", "wide")) if key in shape]
    return ", ".join([kind, *sizes])


def _verdict(flags: list[Reading]) -> str:
    if not flags:
        return '<a class="verdict good" href="#health">✓ no health rule broken</a>'
    names = escape(", ".join(reading.name for reading in flags[:3]))
    more = f" and {len(flags) - 3} more" if len(flags) > 3 else ""
    return f'<a class="verdict bad" href="#health">⚠ look at {names}{more}</a>'


def tiles(run: History) -> str:
    if not run.series:
        return '<p class="card empty" style="margin-top:22px">Nothing has been logged yet.</p>'
    return f'<section class="tiles">{_hero(run)}{"".join(_tile(*tile) for tile in _facts(run))}</section>'


def _hero(run: History) -> str:
    accuracy, reward = run.series.get("eval/accuracy"), run.series.get("reward/mean")
    series, label, show = (
        (accuracy, "Held-out accuracy, before and after", percent)
        if accuracy
        else (reward, "Reward, first and last", number)
    )
    if series is None:
        return ""
    before = f'<span class="from">{show(series.first)}</span><span class="arrow">→</span>' if len(series) > 1 else ""
    best = f"best {show(float(series.finite.max()))}" if len(series.finite) else ""
    control = run.series.get("control/accuracy") if accuracy else None
    note = f"supervised control {percent(control.last)} · {best}" if control else best
    return (
        f'<div class="card tile hero"><div class="label">{label}</div>'
        f'<div class="value">{before}{show(series.last)}</div><div class="note">{note}</div></div>'
    )


def _facts(run: History) -> Iterator[tuple[str, str, str]]:
    yield "Steps", f"{run.num_steps:,}", ""
    yield "Wall time", duration(run.seconds), ""
    if (tokens := run.sampled_tokens) is not None:
        yield "Tokens sampled", count(tokens), ""
    if (speed := run.series.get("perf/rollout_tokens_per_s")) and len(speed.finite):
        yield "Rollout tokens/s", number(float(np.median(speed.finite)), 3), "median over steps"
    if k3 := run.series.get("mismatch/k3"):
        yield "Mismatch k3", number(k3.last, 2), "KL, sampler to learner, last step"
    if f2 := run.series.get("mismatch/f2"):
        yield "Mismatch F(2)", f"{100 * f2.last:.2g}%", "tokens off by more than 2×"


def _tile(label: str, value: str, note: str) -> str:
    return (
        f'<div class="card tile"><div class="label">{escape(label)}</div>'
        f'<div class="value">{escape(value)}</div><div class="note">{escape(note)}</div></div>'
    )


def charts(panels: Sequence[Panel], zero: Sequence[Panel]) -> str:
    """A place for each of `panels`, and a line about those that have nothing to draw."""
    if not panels and not zero:
        return ""
    figures = "".join(f'<figure class="card" data-panel="{i}"></figure>' for i in range(len(panels)))
    smooth = '<label>Smoothing <input id="smooth" type="range" min="0" max="0.95" step="0.05" value="0"></label>'
    return (
        f'<h2>Charts</h2><div class="tools">{smooth}</div><div class="charts">{figures}</div>'
        f"{_zero(zero)}<noscript>The charts and samples need JavaScript; plots/ holds the charts as images.</noscript>"
    )


def _zero(panels: Sequence[Panel]) -> str:
    titles = "; ".join(panel.chart.title for panel in panels)
    return f'<p class="zero">0 throughout, so not drawn: {escape(titles)}.</p>' if panels else ""


def time_split(runs: Sequence[History]) -> str:
    bars = [_bar(run, titled=len(runs) > 1) for run in runs]
    note = "the whole run; what overlaps, as sampling and learning may, is counted in each"
    return f"<h2>Where the time went <small>{note}</small></h2>{''.join(bars)}" if any(bars) else ""


def _times(run: History) -> dict[str, float]:
    """Seconds by phase, over the run: of the steps and what comes between them, of supervised learning, and the rest
    (loading a model, writing reports)."""
    logged = {name.removeprefix("time/"): float(s.finite.sum()) for name, s in run.match("time/*").items()}
    logged.pop("total", None)
    parts = logged | run.supervised
    rest = {"other": run.seconds - sum(parts.values())} if parts else {}
    return {name: s for name, s in sorted((parts | rest).items(), key=lambda part: phase_color(part[0])) if s > 0}


def _bar(run: History, titled: bool) -> str:
    parts = _times(run)
    whole = sum(parts.values())
    if not whole:
        return ""
    colors = [f"var(--c{phase_color(name)})" for name in parts]
    segments = "".join(
        f'<i style="flex:{seconds / whole:.5f};background:{color}" title="{escape(name)}"></i>'
        for color, (name, seconds) in zip(colors, parts.items(), strict=True)
    )
    legend = "".join(
        f'<span><span class="dot" style="background:{color}"></span>{escape(name)} '
        f"<b>{duration(seconds)}</b> {_share(seconds / whole)}</span>"
        for color, (name, seconds) in zip(colors, parts.items(), strict=True)
    )
    title = f"<h3>{escape(run.name)}</h3>" if titled else ""
    return f'<div class="card split">{title}<div class="bar">{segments}</div><div class="legend">{legend}</div></div>'


def _share(value: float) -> str:
    return f"{value:.0%}" if value >= 0.005 else "&lt;1%"


def samples(shown: Sequence[Row]) -> str:
    if not shown:
        return ""
    return '<h2>Answers <small>what the model said, and what it got for it</small></h2><div id="samples"></div>'


def health(run: History) -> str:
    if not run.series:
        return ""
    found = readings(run)
    whole = [reading for reading in found if not (reading.metric and reading.metric.part)]
    parts = [reading for reading in found if reading not in whole]
    return f'<h2 id="health">Health</h2><div class="card scroll">{_health_table(whole)}</div>{_folded(parts)}'


def _folded(parts: Sequence[Reading]) -> str:
    """What is told of parts of the tokens: too much to read through, there to be looked up."""
    if not parts:
        return ""
    flags = sum(bool(reading.flag) for reading in parts)
    title = f"The same by part: {len(parts)} figures" + (f", ⚠ {flags}" if flags else "")
    return f'<details class="card"><summary>{title}</summary><div class="scroll">{_health_table(parts)}</div></details>'


def _health_table(found: Sequence[Reading]) -> str:
    names = ("metric", "", "first", "last", "meaning", "healthy<small>unhealthy</small>")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"<table><tr>{head}</tr>{''.join(map(_health_row, found))}</table>"


def _health_row(reading: Reading) -> str:
    meaning = reading.metric.meaning if reading.metric else "not one of Lockstep's own metrics"
    healthy, unhealthy = (reading.metric.healthy, reading.metric.unhealthy) if reading.metric else ("", "")
    state = f'<span class="flag">⚠ {escape(reading.flag)}</span>' if reading.flag else _with_code(healthy)
    warning = f"<small>{_with_code(unhealthy)}</small>" if unhealthy else ""
    return (
        f'<tr><td class="mono">{escape(reading.name)}</td><td class="spark">{sparkline(reading.series)}</td>'
        f'<td class="num">{number(reading.series.first)}</td><td class="num">{number(reading.series.last)}</td>'
        f'<td class="meaning">{_with_code(meaning)}</td><td class="healthy">{state}{warning}</td></tr>'
    )


def _with_code(text: str) -> str:
    """What stands between backticks looks like code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def sparkline(series: Series) -> str:
    thin = series.thin(60)
    finite = np.isfinite(thin.values)
    if finite.sum() < 2:
        return ""
    x, y = thin.steps[finite], thin.values[finite]
    across = 96 * (x - x[0]) / (x[-1] - x[0])
    span = y.max() - y.min()
    down = 20 - 18 * (y - y.min()) / span if span else np.full(len(y), 11.0)
    points = "L".join(f"{a:.1f},{d:.1f}" for a, d in zip(across, down, strict=True))
    return f'<svg viewBox="0 0 96 22" aria-hidden="true"><path d="M{points}"/></svg>'


def events(run: History) -> str:
    if not run.events:
        return ""
    shown = run.events[-_SHOWN_EVENTS:]
    rows = "".join(
        f'<tr><td class="num">{escape(e["step"])}</td><td class="num">{duration(e["time"])}</td>'
        f'<td class="mono">{escape(e["kind"])}</td><td class="val">{escape(e["text"])}</td></tr>'
        for e in shown
    )
    note = f"<small>the last {len(shown)} of {len(run.events)}</small>" if len(shown) < len(run.events) else ""
    head = "<tr><th>step</th><th>time</th><th>kind</th><th>what happened</th></tr>"
    return f'<h2>Events {note}</h2><div class="card scroll"><table>{head}{rows}</table></div>'


def settings(run: History) -> str:
    boxes = [("Config", run.config), ("Environment", run.environment)]
    shown = "".join(
        f'<details class="card"><summary>{title}</summary><div class="scroll">{_key_values(table)}</div></details>'
        for title, table in boxes
        if table
    )
    return f"<h2>Settings</h2>{shown}" if shown else ""


def _key_values(table: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><td class="key mono">{escape(key)}</td><td class="val mono">{escape(value)}</td></tr>'
        for key, value in flatten(table).items()
    )
    return f"<table>{rows}</table>"


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`, the way an override names it."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        inner = flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
        flat.update(inner)
    return flat


def comparison(runs: Sequence[History]) -> str:
    names = (
        "eval/accuracy",
        "control/accuracy",
        "reward/mean",
        "mismatch/k3",
        "mismatch/f2",
        "perf/rollout_tokens_per_s",
    )
    logged = [name for name in names if any(name in run.series for run in runs)]
    head = "".join(f"<th>{escape(name)}</th>" for name in ("run", "steps", "wall time", *logged))
    rows = "".join(f"<tr>{_comparison_row(run, logged, i)}</tr>" for i, run in enumerate(runs))
    return (
        f'<header><p class="eyebrow">Lockstep</p><h1>{len(runs)} runs compared</h1></header>'
        f'<h2>Last values</h2><div class="card scroll"><table><tr>{head}</tr>{rows}</table></div>'
    )


def _comparison_row(run: History, names: Sequence[str], index: int) -> str:
    dot = f'<span class="dot" style="background:var(--c{index % NUM_COLORS})"></span>'
    values = [number(run.series[name].last) if name in run.series else "–" for name in names]
    cells = "".join(f'<td class="num" style="text-align:left">{value}</td>' for value in values)
    return f"<td>{dot}{escape(run.name)}</td><td>{run.num_steps:,}</td><td>{duration(run.seconds)}</td>{cells}"


def differences(runs: Sequence[History]) -> str:
    flats = [flatten(run.config) for run in runs]
    keys = [
        key for key in dict.fromkeys(k for flat in flats for k in flat) if len({str(f.get(key)) for f in flats}) > 1
    ]
    if not keys:
        return ""
    head = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    rows = "".join(
        f'<tr><td class="key mono">{escape(key)}</td>'
        + "".join(f'<td class="val mono">{escape(flat.get(key, "–"))}</td>' for flat in flats)
        + "</tr>"
        for key in keys
    )
    return f'<h2>Settings that differ</h2><div class="card scroll"><table><tr><th></th>{head}</tr>{rows}</table></div>'
