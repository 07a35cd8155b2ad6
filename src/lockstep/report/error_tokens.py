"""The report's section on error tokens: answers that repeat themselves or turned to garble."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.report.excerpts import fell_apart
from lockstep.report.history import History
from lockstep.report.jsonl import Row
from lockstep.report.sections import escape, number, percent
from lockstep.types import FLAWS

_EXAMPLES = 6
_IN_WORDS = {"repetition": "repeat themselves", "garble": "are garbled"}


def error_tokens(run: History, answers: Sequence[Row]) -> str:
    """How common they are among answers below their group's mean, and the latest of those; empty if there is none."""
    flawed = [answer for answer in answers if fell_apart(answer)]
    if not flawed:
        return ""
    cards = "".join(_card(answer) for answer in reversed(flawed[-_EXAMPLES:]))
    return (
        "<h2>Error tokens <small>answers that repeat themselves or turned to garble</small></h2>"
        f'<p class="about">{escape(_shares(run))}The latest of them:</p>'
        f'<div class="answers" id="error-tokens">{cards}</div>'
    )


def _shares(run: History) -> str:
    """A sentence, if the run measured them."""
    series = {name: run.series[f"rollout/{name}"] for name in FLAWS if f"rollout/{name}" in run.series}
    shares = [f"{percent(s.last)} {_IN_WORDS[name]} (first step: {percent(s.first)})" for name, s in series.items()]
    if not shares:
        return ""
    return f"Of the answers with a reward below their group's mean, at the last step: {', '.join(shares)}. "


def _card(answer: Row) -> str:
    badges = "".join(f'<span class="badge bad">{escape(flaw)}</span>' for flaw in answer["flaws"])
    reward = "failed" if answer["reward"] is None else number(answer["reward"])
    facts = f"step {answer['step']} · reward {reward} · {answer['num_tokens']} tokens · {answer['sample']}"
    return (
        f'<article class="card answer"><div class="top">{badges}<span>{escape(facts)}</span></div>'
        f'<pre class="text">{escape(answer["text"])}</pre></article>'
    )
