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
    assert judged(lambda _sample, _answer: verdict, SAMPLE, "") is verdict


def test_a_plain_number_is_a_reward() -> None:
    assert judged(lambda _sample, answer: len(answer), SAMPLE, "abc") == Verdict(value=3.0)
