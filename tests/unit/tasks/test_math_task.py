import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import ConfigError
from lockstep.tasks.math import Math, last_boxed
from lockstep.types import Message, Sample

GSM8K = {
    "question": "Two and two thousand?",
    "answer": "We add 2+2000 = <<2+2000=2002>>2002.\n#### 2,002",
}
MATH = {"problem": "What is half?", "solution": "It is $\\boxed{\\frac{1}{2}}$."}
MATH500 = {**MATH, "answer": "\\frac{1}{2}"}
VERL = {
    "prompt": [{"role": "system", "content": "Box it."}, {"role": "user", "content": "Half?"}],
    "reward_model": {"ground_truth": "\\frac{1}{2}", "style": "rule"},
}


def task(tmp_path: Path, *rows: dict[str, Any], **options: Any) -> Math:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Math(path=str(path), eval_path=str(path), **options)


def test_layouts(tmp_path: Path) -> None:
    gsm8k, math, math500, verl = task(tmp_path, GSM8K, MATH, MATH500, VERL, instruction="Box it.").samples("train")
    assert gsm8k.messages == (Message("user", "Two and two thousand? Box it."),)
    assert gsm8k.answer == "2002"
    assert gsm8k.solution == "We add 2+2000 = 2002.\nThe answer is \\boxed{2002}."
    assert math.messages == (Message("user", "What is half? Box it."),)
    assert math.answer == math500.answer == verl.answer == "\\frac{1}{2}"
    assert math.solution == math500.solution == MATH["solution"]
    assert verl.messages == (Message("system", "Box it."), Message("user", "Half?"))
    assert verl.solution is None


def test_a_final_answer_is_enough(tmp_path: Path) -> None:
    (sample,) = task(tmp_path, {"problem": "1-1?", "answer": 0}).samples("train")
    assert (sample.answer, sample.solution) == ("0", None)


def test_gold_solutions_are_correct(tmp_path: Path) -> None:
    made = task(tmp_path, GSM8K, MATH, VERL)
    demonstrations = made.demonstrations()
    assert len(demonstrations) == 2
    for sample in demonstrations:
        assert made.reward(sample, sample.solution or "").value == 1.0


@pytest.mark.parametrize(
    ("answer", "value", "reason"),
    [
        ("\\boxed{\\frac12}", 1.0, "\\frac12 is \\frac{1}{2}"),
        ("So it is \\boxed{0.5}.", 1.0, "0.5 is \\frac{1}{2}"),
        ("\\boxed{1} or rather \\boxed{\\dfrac{2}{4}}", 1.0, "\\dfrac{2}{4} is \\frac{1}{2}"),
        ("\\boxed{0.5} or rather \\boxed{3}", 0.0, "3 is not \\frac{1}{2}"),
        ("The answer is 1/2.", 1.0, "1/2 is \\frac{1}{2}"),
        ("The answer is 41.", 0.0, "41 is not \\frac{1}{2}"),
        ("no idea", 0.0, "nothing is not \\frac{1}{2}"),
        ("\\boxed{}", 0.0, "nothing is not \\frac{1}{2}"),
    ],
)
def test_equivalent_answers(answer: str, value: float, reason: str) -> None:
    sample = Sample(uid="train/0", messages=(), answer="\\frac{1}{2}")
    verdict = Math(path="unused").reward(sample, answer)
    assert verdict.value == value
    assert verdict.reasons == (f"correct: {reason}",)


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        ("58", "58 apples"),
        ("58", "15 + 43 = 58"),
        ("58", "\\boxed{15+43=58}"),
        ("58", "It is **58**."),
        ("-7", "\\boxed{x = -7}"),
        ("58", "\\boxed{58^\\circ}"),
        ("25", "\\boxed{25 \\text{ cm}^2}"),
        ("5", "\\boxed{5 \\text{ m/s}}"),
        ("1000", "\\boxed{1,000}"),
        ("50", "\\boxed{50\\%}"),
        ("0.5", "\\boxed{1/2}"),
        ("1.5", "\\boxed{1\\frac12}"),
        ("15+43", "\\boxed{58}"),
        ("2^{10}", "\\boxed{2^{10}}"),
        ("8", "\\boxed{+8}"),
        (".0000672", "\\boxed{6.72 \\times 10^{-5}}"),
        ("58", "\\boxed{58 = 15+43}"),
        ("58", "\\boxed{15+43 \\approx 58}"),
        ("1,\\!000", "\\boxed{1{,}000}"),
        ("17\\%", "\\boxed{17\\%}"),
        ("\\$36", "It is $36."),
        ("\\frac{3}{4}", "\\boxed{6/8}"),
        ("\\frac{3}{4}", "\\boxed{0.75}"),
        ("1, 3", "\\boxed{3, 1}"),
        ("1:4", "\\boxed{1:4}"),
        ("-\\frac{1}{2}", "\\boxed{-\\frac{1}{2}}"),
    ],
)
def test_a_number_is_an_answer(expected: str, answer: str) -> None:
    assert Math(path="unused").reward(Sample(uid="train/0", messages=(), answer=expected), answer).value == 1.0


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        ("58", "The answer is 15 + 43."),
        ("58", "\\boxed{15+43}"),
        ("72", "So Tom has 73 + 19 - 20."),
        ("5", "\\boxed{7 - 2}"),
        ("48", "\\boxed{12 \\times 4}"),
        ("8", "\\boxed{2^{3}}"),
        ("4", "\\boxed{\\sqrt{16}}"),
        ("24", "\\boxed{4!}"),
        ("24", "\\boxed{48/2}"),
        ("0.5", "\\boxed{0.25 + 0.25}"),
        ("10", "\\boxed{\\binom{5}{2}}"),
        ("1000000", "\\boxed{10^6}"),
        ("58", "\\boxed{60 − 2}"),
        ("58", "\\boxed{2 ⋅ 29}"),
        ("55", "\\boxed{\\sum_{k=1}^{10} k}"),
        ("8", "\\boxed{(2)^3}"),
        ("5", "\\boxed{\\lfloor 5.7 \\rfloor}"),
        ("12.00", "\\boxed{24/2}"),
        ("\\$58", "\\boxed{15+43}"),
        ("1,\\!000", "\\boxed{500+500}"),
        ("\\frac{3}{4}", "\\boxed{\\frac12+\\frac14}"),
    ],
)
def test_a_sum_is_none(expected: str, answer: str) -> None:
    """Found by a policy: repeating the question was paid for, since math-verify works it out."""
    verdict = Math(path="unused").reward(Sample(uid="train/0", messages=(), answer=expected), answer)
    assert verdict.value == 0.0
    assert f"is {expected}, but not worked out" in verdict.reasons[0]


def test_box_as_a_rule_and_as_a_part() -> None:
    sample = Sample(uid="train/0", messages=(), answer="42")
    strict = Math(path="unused", boxed_only=True, format_weight=0.1)
    assert strict.reward(sample, "The answer is 42.").parts == {"correct": 0.0, "format": 0.0}
    assert strict.reward(sample, "\\boxed{42}").parts == {"correct": 1.0, "format": 0.1}
    assert strict.reward(sample, "\\boxed{41}").reasons == ("correct: 41 is not 42", "format: an answer in \\boxed{}")


def test_last_boxed() -> None:
    assert last_boxed("\\boxed{a{b}c} and \\boxed{cut off") == "a{b}c"
    assert last_boxed("\\boxed{ 7 }") == "7"
    assert last_boxed("none") is None


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"text": "?"}, "train/0 has none of the known layouts .* it has text"),
        ({"question": "?", "answer": "no marker"}, "train/0 has none of the known layouts"),
        ({"problem": "?", "solution": "no box"}, "train/0 has neither an answer nor a solution"),
    ],
)
def test_bad_rows(tmp_path: Path, row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        task(tmp_path, row).samples("train")[0]
