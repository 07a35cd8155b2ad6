"""`report.html`: one file that shows a run, or several side by side. Needs no network, follows light and dark."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from lockstep.report import sections
from lockstep.report.charts import Line, Panel, panels
from lockstep.report.disagreement import disagreement
from lockstep.report.error_tokens import error_tokens
from lockstep.report.excerpts import excerpts
from lockstep.report.governing import banner, firings, governor
from lockstep.report.history import History
from lockstep.report.jsonl import Row, write_atomically
from lockstep.report.plots import write_plots
from lockstep.report.run_folder import RunFolder


def write_report(folder: RunFolder) -> Path:
    """Writes `report.html` and `plots/*.png` from what the run has logged so far; returns the page's path."""
    run = History.read(folder)
    charts, zero = _drawn(panels([run]))
    answers = excerpts(folder)
    body = [
        sections.header(run),
        banner(run),
        sections.tiles(run),
        sections.charts(charts, zero),
        disagreement(run),
        sections.time_split([run]),
        governor(run),
        sections.samples(answers),
        error_tokens(run, answers),
        sections.health(run),
        sections.events(run),
        sections.settings(run),
    ]
    write_atomically(folder.report, render(f"{run.name} · Lockstep", body, charts, answers, _marks(run)))
    write_plots(folder)
    return folder.report


def write_comparison(folders: Sequence[RunFolder], path: Path) -> Path:
    """Several runs on the same axes, and the settings in which they differ."""
    if len(folders) < 2:
        raise ValueError(f"a comparison needs two runs or more, got {len(folders)}")
    runs = [History.read(folder) for folder in folders]
    charts, zero = _drawn(panels(runs))
    body = [
        sections.comparison(runs),
        sections.charts(charts, zero),
        sections.time_split(runs),
        sections.differences(runs),
    ]
    write_atomically(path, render("Comparison · Lockstep", body, charts))
    return path


def _drawn(found: Sequence[Panel]) -> tuple[list[Panel], list[Panel]]:
    """Those with something to draw, and those that are 0 throughout."""
    return [panel for panel in found if not panel.is_zero], [panel for panel in found if panel.is_zero]


def _marks(run: History) -> list[int]:
    """Steps that the charts mark: those at which the governor spoke."""
    return sorted({event["step"] for event in firings(run)})


def render(
    title: str, body: Sequence[str], charts: Sequence[Panel], samples: Sequence[Row] = (), marks: Sequence[int] = ()
) -> bytes:
    """A page around `body`, whose elements with `data-panel="i"` become chart i."""
    data = {
        "panels": [_panel_data(panel) for panel in charts],
        "samples": list(samples),
        "reward": _range(samples),
        "marks": marks,
    }
    page = Template(_asset("page.html")).substitute(
        title=sections.escape(title),
        css=_asset("page.css"),
        body="\n".join(body),
        data=embed(data),
        script=_asset("page.js"),
    )
    return page.encode("utf-8", "replace")


def embed(data: Mapping[str, Any]) -> str:
    """JSON that is safe inside a script element, whatever text it holds: no `<`, so no tag can end or begin."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return (files("lockstep.report") / name).read_text("utf-8")


def _panel_data(panel: Panel) -> dict[str, Any]:
    return {
        "title": panel.chart.title,
        "help": panel.chart.help,
        "format": panel.chart.format,
        "stacked": panel.chart.stacked,
        "x_label": panel.x_label,
        "marked": panel.x_label == "step" and panel.chart.key != "warmup",  # the warm-up counts its own steps
        "x_log": panel.x_log,
        "y_log": panel.y_log,
        "scatter": panel.scatter,
        "tall": panel.tall,
        "lines": [_line_data(line) for line in panel.lines],
    }


def _line_data(line: Line) -> dict[str, Any]:
    return {
        "label": line.label,
        "color": line.color,
        "dashed": line.dashed,
        "alpha": line.alpha,
        "x": [_short(x) for x in line.x],
        "y": [_short(y) for y in line.y],
    }


def _short(value: float) -> float | int | None:
    """Five digits are more than a chart shows; null leaves a gap where a value is not finite."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else float(f"{value:.5g}")


def _range(samples: Sequence[Row]) -> dict[str, float]:
    """What counts as a good and a bad reward in this run: the upper and lower quarter of the rewards shown."""
    rewards = [row["reward"] for row in samples if row["reward"] is not None]
    low, high = min(rewards, default=0.0), max(rewards, default=1.0)
    return (
        {"low": low + (high - low) / 4, "high": high - (high - low) / 4} if high > low else {"low": -1e9, "high": low}
    )
