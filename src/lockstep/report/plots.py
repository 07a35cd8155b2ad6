"""PNG plots of a run, for papers, slides and pull requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from lockstep.report.charts import Panel, panels
from lockstep.report.history import History
from lockstep.report.run_folder import RunFolder

COLORS = (
    "#2563eb", "#e07b00", "#0a9271", "#9333ea", "#dc2f55", "#0891b2", "#7c6f64", "#b59a00", "#65a30d", "#64748b"
)  # fmt: skip


def write_plots(folder: RunFolder) -> list[Path]:
    """Draws every chart that has something to show into `plots/`; returns the files."""
    folder.plots.mkdir(exist_ok=True)
    found = [panel for panel in panels([History.read(folder)]) if not panel.is_zero]
    paths = [folder.plots / f"{panel.chart.key}.png" for panel in found]
    for panel, path in zip(found, paths, strict=True):
        draw(panel, path)
    return paths


def draw(panel: Panel, path: Path) -> None:
    figure = Figure(figsize=(6.4, 3.6), dpi=150)
    figure.subplots_adjust(left=0.11, right=0.97, top=0.9, bottom=0.14)  # a layout engine would draw everything twice
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    drawing = _draw_dots if panel.scatter else _draw_stack if panel.chart.stacked else _draw_lines
    drawing(axes, panel)
    _dress(axes, panel)
    figure.savefig(path)


def _draw_lines(axes: Axes, panel: Panel) -> None:
    for line in panel.lines:
        y = np.where(line.y > 0, line.y, np.nan) if panel.y_log else line.y
        axes.plot(
            line.x,
            np.where(np.isfinite(y), y, np.nan),
            label=_as_text(line.label),
            color=COLORS[line.color % len(COLORS)],
            linestyle="--" if line.dashed else "-",
            marker="o" if len(line.x) <= 40 and not line.dashed else None,
            markersize=3,
            linewidth=1.6,
            alpha=line.alpha,
        )


def _as_text(label: str) -> str:
    """A part of a reward may be called anything; between two dollars would be a formula."""
    return label.encode("utf-8", "backslashreplace").decode().replace("$", r"\$")


def _draw_dots(axes: Axes, panel: Panel) -> None:
    for line in panel.lines:
        axes.plot(
            line.x,
            line.y,
            ".",
            markersize=2,
            alpha=0.4,
            color=COLORS[line.color % len(COLORS)],
            label=_as_text(line.label),
        )
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.6, alpha=0.5)
    axes.set_aspect("equal")


def _draw_stack(axes: Axes, panel: Panel) -> None:
    x = panel.lines[0].x
    middles = (x[1:] + x[:-1]) / 2
    edges = np.concatenate([[x[0] - 0.5], middles, [x[-1] + 0.5]])
    bottom = np.zeros(len(x))
    for line in panel.lines:
        top = bottom + line.y
        axes.stairs(
            top, edges, baseline=bottom, fill=True, label=_as_text(line.label), color=COLORS[line.color % len(COLORS)]
        )
        bottom = top
    axes.set_ylim(0, (bottom.max() or 1.0) * 1.2)  # room for the legend


def _dress(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.chart.title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(panel.x_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    if panel.x_log:
        _label_taus(axes, panel)
    if panel.y_log:
        axes.set_yscale("log")
    if panel.chart.format == "percent":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if len(panel.lines) > 1:
        columns, place = (6, "upper left") if panel.chart.stacked else (1, "best")
        axes.legend(frameon=False, fontsize=8, ncols=columns, loc=place)


def _label_taus(axes: Axes, panel: Panel) -> None:
    axes.set_xscale("log")
    axes.set_xticks([tau for tau in panel.lines[0].x if tau < 1.2 or tau >= 1.5])  # 1.1 and 1.25 would overlap
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tau, _: f"{tau:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
