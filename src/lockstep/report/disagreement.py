"""The report's section on where sampler and learner disagree: by lag, place, sign of the advantage and probability."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lockstep.metrics import LENGTHS, PARTS, Part
from lockstep.report.history import History, Series
from lockstep.report.sections import escape, number, percent, sparkline

_TITLES = {
    "lag*": ("By lag", "weight versions between sampling and learning"),
    "pos*": ("By place in the answer", "sampled tokens before this one"),
    "adv_*": ("By advantage", "worse or better than the other answers"),
    "prob*": ("By probability", "what the learner gave the token before the step"),
}
_SIGNS = {"neg": "A < 0", "zero": "A = 0", "pos": "A > 0"}
ROUNDING = 1e-9  # a k3 so small is nothing to look at, even if all others are smaller
_ACCEPTANCE = ("answers", "accepted_answers", "accepted_tokens")


@dataclass(frozen=True, slots=True)
class Cell:
    """One part of the tokens, over the last steps of the run."""

    label: str  # "16–31"
    tokens: float
    k3: float
    f2: float
    trend: Series  # of k3, over the whole run


def disagreement(run: History) -> str:
    """Empty where no part was logged. A kind with one part says no more than the whole and is left out."""
    since = _since(run)
    tables = [(part, cells) for part in PARTS if len(cells := list(_cells(run, part, since))) > 1]
    acceptance = _acceptance(run, since)
    if not tables and not acceptance:
        return ""
    shaded = {"k3": ROUNDING, "f2": 0.0}
    most = [max([least, *(getattr(cell, x) for _, cells in tables for cell in cells)]) for x, least in shaded.items()]
    shown = "".join(_table(part, cells, most) for part, cells in tables)
    steps = f"means over steps {since} to {run.num_steps}; darker is more"
    title = f"<h2>Where sampler and learner disagree <small>{steps}</small></h2>"
    return f'{title}<div class="charts">{shown}{acceptance}</div>'


def _since(run: History) -> int:
    """The last tenth of the run, so that single steps do not decide."""
    return run.num_steps - run.num_steps // 10


def _cells(run: History, part: Part, since: int) -> Iterator[Cell]:
    for name, label in _labels(part):
        series = [run.series.get(f"mismatch/{name}/{figure}") for figure in ("tokens", "k3", "f2")]
        means = [_mean(s, since) for s in series]
        if series[1] and None not in means:
            tokens, k3, f2 = (mean for mean in means if mean is not None)
            yield Cell(label, tokens, k3, f2, series[1])


def _labels(part: Part) -> list[tuple[str, str]]:
    """The names of its cells and what they hold."""
    if not part.bounds:
        return [(part.name.replace("*", sign), label) for sign, label in _SIGNS.items()]
    return [(part.name.replace("*", f"{low:g}"), label) for low, label in _ranges(part.bounds)]


def _ranges(bounds: Sequence[float]) -> list[tuple[float, str]]:
    """Whole numbers up to the one before the next bound, others up to the bound."""
    whole = all(bound == int(bound) for bound in bounds)
    ends = [(low, high - 1 if whole else high) for low, high in pairwise(bounds)]
    closed = [(low, f"{low:g}" if low == high else f"{low:g}–{high:g}") for low, high in ends]
    return [*closed, (bounds[-1], f"{bounds[-1]:g}+" if whole else f"{bounds[-1]:g}–1")]


def _mean(series: Series | None, since: int) -> float | None:
    if series is None:
        return None
    recent = series.since(since).finite
    return float(recent.mean()) if len(recent) else None


def _table(part: Part, cells: Sequence[Cell], most: Sequence[float]) -> str:
    title, help_ = _TITLES[part.name]
    whole = sum(cell.tokens for cell in cells)
    rows = "".join(
        f"<tr><td>{escape(cell.label)}</td>"
        f'<td class="num">{percent(cell.tokens / whole)}</td>'
        f"{_heat(number(cell.k3, 2), cell.k3, most[0])}{_heat(f'{100 * cell.f2:.2g}%', cell.f2, most[1])}"
        f'<td class="spark">{sparkline(cell.trend)}</td></tr>'
        for cell in cells
    )
    head = "<tr><th></th><th>tokens</th><th>k3</th><th>F(2)</th><th>k3 over the run</th></tr>"
    return _card(title, help_, f"{head}{rows}")


def _heat(text: str, value: float, most: float) -> str:
    """By the root, so that a tenth of the largest still shows."""
    share = (value / most) ** 0.5 if most > 0 and value > 0 else 0.0
    return f'<td class="num heat" style="--heat:{share:.2f}">{text}</td>'


def _acceptance(run: History, since: int) -> str:
    """What a rejecting correction let through; nothing if none rejected anything."""
    if not any((s.finite < 1).any() for s in run.match("mismatch/len*/accepted_tokens").values()):
        return ""
    found = [
        (label, *(_mean(run.series.get(f"mismatch/len{low:g}/{x}"), since) for x in _ACCEPTANCE))
        for low, label in _ranges(LENGTHS)
    ]
    rows = "".join(
        f'<tr><td>{label}</td><td class="num">{number(answers, 3)}</td>'
        f"{_heat(percent(kept), 1 - kept, 1.0)}{_heat(percent(tokens), 1 - tokens, 1.0)}</tr>"
        for label, answers, kept, tokens in found
        if answers is not None and kept is not None and tokens is not None
    )
    head = "<tr><th></th><th>answers a step</th><th>accepted</th><th>of their tokens</th></tr>"
    return _card("Accepted by length", "what the correction left of answers of each length", f"{head}{rows}")


def _card(title: str, help_: str, rows: str) -> str:
    return f'<figure class="card"><figcaption><b>{title}</b><p>{help_}</p></figcaption><table>{rows}</table></figure>'
