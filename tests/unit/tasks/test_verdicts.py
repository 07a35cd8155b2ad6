import asyncio
import os
import re
from pathlib import Path
from typing import Any

import pytest

from lockstep.tasks.judging import Part, combine, failed, judged
from lockstep.types import Message, Sample, Verdict

SAMPLE = Sample(uid="train/0", messages=(Message("user", "?"),))


def test_parts_are_weighted_and_say_why() -> None:
    verdict = combine(Part("correct", 1.0, "42 is 42"), Part("format", 0.5, "half of it", weight=0.2))
    assert verdict.value == pytest.approx(1.1)
    assert verdict.parts == {"correct": 1.0, "format": 0.1}
    assert verdict.reasons == ("correct: 42 is 42", "format: half of it")


@pytest.mark.parametrize(
    ("verdict", "correct"),
    [
        (combine(Part("correct", 1.0, "", weight=0.9), Part("format", 1.0, "", weight=0.1)), True),
        (combine(Part("correct", 1.0, "", weight=0.9), Part("format", 0.0, "", weight=0.1)), True),
        (combine(Part("correct", 0.9, "", weight=5.0)), False),
        (combine(Part("correct", 0.0, ""), Part("format", 1.0, "")), False),
        (combine(Part("placed", 1.0, "")), True),
        (combine(Part("placed", 1.0, "", weight=0.2)), False),
        (Verdict(value=0.2, parts={"correct": 1.0}), True),
        (Verdict(value=1.2, parts={"correct": 0.5}), False),
        (Verdict(value=0.7, correct=True), True),
        (Verdict(value=1.0, correct=False), False),
        (1, True),
        (True, True),
        (0.99, False),
        (failed("it broke"), False),
    ],
)
def test_an_answer_is_correct_whatever_the_weights(verdict: Verdict | float, correct: bool) -> None:
    assert judged(lambda _sample, _answer: verdict, SAMPLE, "").is_correct is correct


def test_a_failure_is_one_short_line() -> None:
    verdict = failed("first\nsecond " + "x" * 1000)
    assert verdict.failed
    assert verdict.reasons[0].startswith("failed: first second xxx")
    assert len(verdict.reasons[0]) < 320


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_parts_and_values_must_be_finite(value: float) -> None:
    for bad in (Verdict(value=value), Verdict(value=1.0, parts={"x": value}), value):
        assert judged(lambda _sample, _answer, bad=bad: bad, SAMPLE, "").failed


def test_a_reward_may_fail_on_purpose() -> None:
    verdict = failed("the judge model does not answer")
    assert judged(lambda _sample, _answer: verdict, SAMPLE, "") == verdict


@pytest.mark.parametrize("reasons", [None, (), (object(),), ("x" * 10_000,)])
def test_reasons_may_be_anything_and_are_kept_short(reasons: Any) -> None:
    for value in (None, 1.0):
        verdict = judged(lambda _sample, _answer, value=value: Verdict(value=value, reasons=reasons), SAMPLE, "")
        assert verdict.value == value
        assert all(isinstance(reason, str) and len(reason) < 320 for reason in verdict.reasons)


@pytest.mark.parametrize("error", [ValueError, SystemExit, asyncio.CancelledError, GeneratorExit])
def test_a_reward_that_raises_is_failed_and_says_where(error: type[BaseException]) -> None:
    def reward(_sample: Sample, _answer: str) -> float:
        raise error("oh no")

    verdict = judged(reward, SAMPLE, "")
    assert verdict.failed
    assert re.search(rf"raised .*{error.__name__}: oh no \(.*test_verdicts\.py:\d+\)", verdict.reasons[0])


def test_a_process_that_a_reward_forked_does_not_go_on_with_the_caller(tmp_path: Path) -> None:
    def reward(_sample: Sample, _answer: str) -> float:
        if child := os.fork():
            os.waitpid(child, 0)
            return 1.0
        raise SystemExit

    verdict = judged(reward, SAMPLE, "")
    with (tmp_path / "callers").open("a") as callers:
        callers.write(f"{os.getpid()}\n")
    assert verdict.value == 1.0
    assert (tmp_path / "callers").read_text() == f"{os.getpid()}\n"


def test_a_plain_number_is_a_reward() -> None:
    assert judged(lambda _sample, answer: len(answer), SAMPLE, "abc") == Verdict(value=3.0)
