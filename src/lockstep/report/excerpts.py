"""The answers a page shows: the first, the last, the best, the worst, those that failed, were cut off or fell apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.report.jsonl import Row
from lockstep.report.run_folder import RunFolder

_MAX_PROMPT, _MAX_TEXT, _MAX_SHORT = 1_500, 3_000, 300  # characters


@dataclass(slots=True)
class _Entry:
    place: int  # line in samples.jsonl
    reward: float | None
    truncated: bool
    flawed: bool
    times: int = 0  # that the same was said to the same prompt in the same step


def excerpts(folder: RunFolder, each: int = 24) -> list[Row]:
    """Up to `each` answers of every kind, long texts shortened, each with how many `times` it was given in its group.

    Two passes, as a long log need not fit in memory.
    """
    wanted = {entry.place: entry.times for entry in _choose(_distinct(folder.read_samples()), each)}
    rows = ((row, wanted.get(place)) for place, row in enumerate(folder.read_samples()))
    return [{**_shorten(row), "times": times} for row, times in rows if times]


def _distinct(rows: Iterable[Row]) -> list[_Entry]:
    """One entry for all answers of a group that read the same and were judged the same."""
    found: dict[int, _Entry] = {}
    for place, row in enumerate(rows):
        said = hash((row["step"], row["sample"], row["text"], row["reward"]))
        found.setdefault(said, _entry(place, row)).times += 1
    return list(found.values())


def _entry(place: int, row: Row) -> _Entry:
    return _Entry(place, row["reward"], row["stop_reason"] == "length", fell_apart(row))


def fell_apart(row: Row) -> bool:
    """Flawed, and judged worse than its group's mean: what the shares of error tokens are about."""
    return bool(row.get("flaws")) and row.get("negative", False)


def _choose(index: list[_Entry], each: int) -> list[_Entry]:
    judged = sorted((e for e in index if e.reward is not None), key=lambda e: (e.reward, e.place))
    failed = [e for e in index if e.reward is None]
    cut = [e for e in index if e.truncated]
    flawed = [e for e in index if e.flawed]
    kinds = (index[:each], index[-each:], judged[:each], judged[-each:], failed[-each:], cut[-each:], flawed[-each:])
    return [entry for kind in kinds for entry in kind]


def _shorten(row: Row) -> Row:
    prompt = [{**message, "content": _cut(message["content"], _MAX_PROMPT)} for message in row["prompt"]]
    reasons = [_cut(reason, _MAX_SHORT) for reason in row["reasons"][:8]]
    expected = _cut(row["expected"], _MAX_SHORT)
    return {**row, "prompt": prompt, "text": _cut(row["text"], _MAX_TEXT), "expected": expected, "reasons": reasons}


def _cut(text: str, limit: int) -> str:
    """Both ends of a long text: the end is where the answer is."""
    if len(text) <= limit:
        return text
    head, tail = text[: limit * 2 // 3], text[-limit // 3 :]
    return f"{head}\n[… {len(text) - len(head) - len(tail):,} characters …]\n{tail}"
