"""`lockstep analyze routing` as files: a page, its pictures and the figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lockstep.report.jsonl import write_atomically
from lockstep.report.page import render
from lockstep.report.plots import draw
from lockstep.report.route_study import Comparison, RouteStudy
from lockstep.report.sections import escape, number

FIGURES = {
    "mismatch/k3": "KL (k3)",
    "mismatch/f1.1": "F(1.1)",
    "mismatch/f2": "F(2)",
    "mismatch/f10": "F(10)",
    "mismatch/dp_mean": "|Δp|, mean",
    "mismatch/dp_max": "|Δp|, largest",
    "mismatch/w_max": "largest ratio",
    "mismatch/pearson": "correlation",
    "routing/differ": "routers that differ",
    "routing/differ_tokens": "tokens with any",
    "routing/differ_per_token": "differing routers per token",
}
_SHARES = frozenset({"mismatch/f1.1", "mismatch/f2", "mismatch/f10", "routing/differ", "routing/differ_tokens"})
_NOTES = (
    "<b>Sampler and learner</b>: the engine drew the tokens and recorded its experts; the learner scored them with "
    "experts of its own choice.",
    "<b>With replay</b>: the learner ran the recorded experts. Its routers that differ are those that would have "
    "chosen otherwise, given the replayed layers before them.",
    "<b>Learner, twice</b>: two of its own forwards, the second with sequences packed in another order. No replay gets "
    "below that.",
    "Routers are compared as sets, at every token that was forwarded, prompts included; shares are means over "
    "sequences. Probabilities are of sampled tokens.",
)


def shown(name: str, value: float | None) -> str:
    """A figure as people read it."""
    if value is None:
        return "–"
    return f"{100 * value:.3g}%" if name in _SHARES else number(value, 3)


def write_route_study(study: RouteStudy, folder: Path) -> Path:
    """Writes report.html, study.json and a PNG per chart; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    panels, page = study.panels(), folder / "report.html"
    body = [_header(study), _tiles(study), _table(study.comparisons), _charts(len(panels)), _notes()]
    write_atomically(page, render(f"Routing · {study.model} · Lockstep", body, panels))
    write_atomically(folder / "study.json", (json.dumps(study.as_json(), allow_nan=False) + "\n").encode())
    for panel in panels:
        draw(panel, folder / f"{panel.chart.key}.png")
    return page


def _header(study: RouteStudy) -> str:
    facts = "".join(f"<span>{escape(name)} {escape(value)}</span>" for name, value in study.facts.items())
    return (
        f'<header><p class="eyebrow">Lockstep · expert routes of sampler and learner</p>'
        f'<h1>{escape(study.model)}</h1><p class="facts">{facts}</p></header>'
    )


def _tiles(study: RouteStudy) -> str:
    live, replayed, floor = (c.metrics for c in study.comparisons)
    hero = (
        '<div class="card tile hero"><div class="label">KL between sampler and learner (k3), without and with replay'
        f'</div><div class="value"><span class="from">{number(live["mismatch/k3"], 2)}</span>'
        f'<span class="arrow">→</span>{number(replayed["mismatch/k3"], 2)}</div>'
        f'<div class="note">the learner against itself: {number(floor["mismatch/k3"], 2)}</div></div>'
    )
    facts = [
        ("Routers that differ", shown("routing/differ", live["routing/differ"]), "the paper: about 10%"),
        ("Tokens with any", shown("routing/differ_tokens", live["routing/differ_tokens"]), "the paper: 94%"),
        (
            "Routers per token",
            number(live["routing/differ_per_token"], 3),
            f"of {study.num_layers}; the paper: 6 of 48",
        ),
        ("F(2) without replay", shown("mismatch/f2", live["mismatch/f2"]), "tokens off by more than 2×"),
        ("F(2) with replay", shown("mismatch/f2", replayed["mismatch/f2"]), "the same tokens"),
        ("Sampled tokens", study.facts["sampled tokens"], f"in {study.facts['answers']} answers"),
    ]
    return f'<section class="tiles">{hero}{"".join(_tile(*fact) for fact in facts)}</section>'


def _tile(label: str, value: str, note: str) -> str:
    return (
        f'<div class="card tile"><div class="label">{escape(label)}</div>'
        f'<div class="value">{escape(value)}</div><div class="note">{escape(note)}</div></div>'
    )


def _table(comparisons: Sequence[Comparison]) -> str:
    head = "".join(f'<th class="num">{escape(c.label)}</th>' for c in comparisons)
    rows = "".join(
        f"<tr><td>{escape(label)}</td>"
        + "".join(f'<td class="num">{shown(name, c.metrics.get(name))}</td>' for c in comparisons)
        + "</tr>"
        for name, label in FIGURES.items()
    )
    return f'<h2>Figures</h2><div class="card scroll"><table><tr><th></th>{head}</tr>{rows}</table></div>'


def _charts(num: int) -> str:
    figures = "".join(f'<figure class="card" data-panel="{i}"></figure>' for i in range(num))
    return f'<h2>Pictures</h2><div class="charts">{figures}</div>'


def _notes() -> str:
    items = "".join(f"<li>{note}</li>" for note in _NOTES)
    return f'<h2>How to read it</h2><div class="card" style="padding:14px 20px"><ul>{items}</ul></div>'
