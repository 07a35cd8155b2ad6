import pytest

from lockstep.tasks.judging import Part, combine, failed, judged
from lockstep.types import Message, Sample, Verdict

SAMPLE = Sample(uid="train/0", messages=(Message("user", "?"),))


def test_parts_are_weighted_and_say_why() -> None:
    verdict = combine(Part("correct", 1.0, "42 is 42"), Part("format", 0.5, "half of it", weight=0.2))
    assert verdict.value == pytest.approx(1.1)
    assert verdict.parts == {"correct": 1.0, "format": 0.1}
    assert verdict.reasons == ("correct: 42 is 42", "format: half of it")


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
