"""Verdicts: the sum of named, weighted parts, each with its reason; and what a failed reward becomes."""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

from lockstep.types import Sample, Verdict

_LONGEST_REASON = 300

LARGEST = 1e18  # a reward beyond has no square in float32: somebody's mistake


@dataclass(frozen=True, slots=True)
class Part:
    """One thing a reward looks at: Part("correct", 0.0, "41 is not 42")."""

    name: str
    score: float
    reason: str
    weight: float = 1.0


def combine(*parts: Part) -> Verdict:
    """The weighted sum of the parts. `Verdict.parts` holds the weighted scores, so they add up to the value; an answer
    is correct if the part of that name scores at least 1 before its weight."""
    weighted = {part.name: part.weight * part.score for part in parts}
    assert len(weighted) == len(parts), f"two parts of one name: {[part.name for part in parts]}"
    return Verdict(
        value=sum(weighted.values()),
        parts=weighted,
        reasons=tuple(f"{part.name}: {part.reason}" for part in parts),
        correct=next((part.score >= 1.0 for part in parts if part.name == "correct"), None),
    )


def failed(why: str) -> Verdict:
    """No verdict could be reached. That is not a zero: the answer does not train."""
    line = " ".join(why.split()).removeprefix("failed: ")
    return Verdict(value=None, reasons=(f"failed: {line[:_LONGEST_REASON]}",))


def judged(reward: Callable[[Sample, str], object], sample: Sample, answer: str) -> Verdict:
    """What `reward` says; failed if it raises or says something that is no reward. A plain number is one.

    A process that the reward forked ends here: two would go on with what only one was asked.
    """
    asked = os.getpid()
    try:
        result = reward(sample, answer)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also asyncio.CancelledError, which would look like an end that somebody wanted
        *_, place = traceback.extract_tb(error.__traceback__)
        said = traceback.format_exception_only(error)[-1]  # of any error, even one that cannot be made text
        return failed(f"the reward raised {said.strip()} ({place.filename}:{place.lineno})")
    finally:
        if os.getpid() != asked:
            os._exit(0)
    try:
        return _checked(result)
    except Exception as error:  # what it says is the user's, and may be anything
        return failed(str(error))


def _checked(result: object) -> Verdict:
    verdict = result if isinstance(result, Verdict) else Verdict(value=_number("reward", result))
    if verdict.failed:
        return failed("; ".join(_reasons(verdict)) or "the reward does not say why")
    return Verdict(
        value=_number("value", verdict.value),
        parts={str(name): _number(f"part {name}", part) for name, part in verdict.parts.items()},
        reasons=_reasons(verdict),
        correct=None if verdict.correct is None else bool(verdict.correct),
    )


def _reasons(verdict: Verdict) -> tuple[str, ...]:
    """As text, none of it long."""
    given = (verdict.reasons,) if isinstance(verdict.reasons, str) else verdict.reasons or ()
    texts = map(str, given)
    return tuple(text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}…" for text in texts)


def _number(what: str, value: object) -> float:
    if not isinstance(value, Real):
        raise TypeError(f"the {what} is {value!r}, which is neither a number nor a Verdict")
    number = float(value)
    if not math.isfinite(number) or abs(number) > LARGEST:
        raise ValueError(f"the {what} is {number}")
    return number
