"""The governor's part of a report page: what it said or did, when and why."""

from __future__ import annotations

from lockstep.protocols import GOVERNOR
from lockstep.report.history import History
from lockstep.report.jsonl import Row
from lockstep.report.sections import escape

_SHOWN = 50


def governor(run: History) -> str:
    """A row per firing; empty if it was silent."""
    fired = firings(run)
    if not fired:
        return ""
    rows = "".join(map(_row, fired[-_SHOWN:]))
    more = f" · the last {_SHOWN} of {len(fired)}" if len(fired) > _SHOWN else ""
    head = "<tr><th>step</th><th>rule</th><th>what it did</th><th>metrics at that step</th></tr>"
    return (
        f'<h2 id="governor">Governor <small>{_mode(run)}{more}</small></h2>'
        f'<div class="card scroll"><table>{head}{rows}</table></div>'
    )


def banner(run: History) -> str:
    """One line for the top of the page."""
    fired = firings(run)
    if not fired:
        return ""
    rules = ", ".join(dict.fromkeys(event["text"].partition(": ")[0] for event in fired))
    said = f"the governor spoke first at step {fired[0]['step']}: {rules}"
    return f'<a class="verdict bad" href="#governor">⚠ {escape(said)}</a>'


def firings(run: History) -> list[Row]:
    return [event for event in run.events if event["kind"] == GOVERNOR]


def _mode(run: History) -> str:
    active = run.config.get("governor", {}).get("mode") == "active"
    return "active: it acted on its rules" if active else "advisory: it tells what it would have done"


def _row(event: Row) -> str:
    rule, _, rest = event["text"].partition(": ")
    what, _, metrics = rest.partition("; ")
    return (
        f'<tr><td class="num">{escape(event["step"])}</td><td class="mono">{escape(rule)}</td>'
        f'<td class="val">{escape(what)}</td><td class="val mono">{escape(metrics)}</td></tr>'
    )
