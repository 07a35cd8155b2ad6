"""Problems with a final answer in mathematics, judged by math-verify: 1/2, 0.5 and \\frac{1}{2} are the same answer.

Rows may have the layout of GSM8K (`question`, and `answer` ending in `#### 42`), of MATH (`problem`, and `answer`
or a `solution` with the answer in \\boxed{}), or of verl's files (`prompt` messages, and `reward_model.ground_truth`).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from math_verify import parse, verify

from lockstep.config import ConfigError
from lockstep.tasks._dataset import DatasetTask, read_messages
from lockstep.tasks.judging import Part, combine
from lockstep.types import Sample, Verdict

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of having no time limit, which the judge has

_BOX = "\\boxed{"
_CALCULATION = re.compile(r"<<.*?>>")  # GSM8K's calculator notes inside worked answers
_SEPARATOR = re.compile(r"\{,\}|,?\\[!,;: ]|,(?=\d{3}(?!\d))")  # of thousands
_NUMBER = re.compile(r"\d+\.?\d*|\.\d+")
_FRACTION = re.compile(r"-?\d*\s*(\d+\s*[/:]\s*\d+|\\[dt]?frac\s*\{?-?\d+\}?\s*\{?\d+\}?)\.?")
_SCIENTIFIC = re.compile(r"-?[\d.]+\s*\\(times|cdot)\s*10\^\{?-?\d+\}?")


@dataclass(frozen=True, kw_only=True)
class Math(DatasetTask):
    instruction: str = "Let's think step by step and put the final answer within \\boxed{}."
    """Added to every question, except where the rows are whole prompts already."""
    boxed_only: bool = False
    """Only an answer in \\boxed{} counts; otherwise math-verify looks for one in the text when there is no box."""
    format_weight: float = 0.0
    """Reward added for an answer in \\boxed{}, right or wrong."""

    def sample(self, uid: str, row: Mapping[str, Any]) -> Sample:
        question, answer, solution = _read_row(uid, row)
        if isinstance(question, str):
            question = f"{question} {self.instruction}".strip()
        return Sample(uid=uid, messages=read_messages(question), answer=answer, solution=solution)

    def reward(self, sample: Sample, answer: str) -> Verdict:
        box = last_boxed(answer)
        correct = self._judge_final(sample.answer, box, answer)
        if not self.format_weight:
            return combine(correct)
        reason = "no \\boxed{}" if box is None else "an answer in \\boxed{}"
        return combine(correct, Part("format", float(box is not None), reason, self.format_weight))

    def _judge_final(self, expected: str, box: str | None, answer: str) -> Part:
        if box is None and self.boxed_only:
            return Part("correct", 0.0, "no \\boxed{} with a final answer")
        equal, read = equivalent(expected, answer if box is None else f"\\boxed{{{box}}}")
        final = box or read or "nothing"
        if equal and not worked_out(expected, read):
            return Part("correct", 0.0, f"{final[:80]} is {expected}, but not worked out")
        return Part("correct", float(equal), f"{final[:80]} is {'' if equal else 'not '}{expected}")


def _read_row(uid: str, row: Mapping[str, Any]) -> tuple[Any, str, str | None]:
    """Question, final answer and worked solution."""
    if "reward_model" in row:
        return row["prompt"], str(row["reward_model"]["ground_truth"]), None
    if "problem" in row:
        return row["problem"], _final_of_math(uid, row), row.get("solution")
    if "question" in row and "####" in str(row.get("answer")):
        work, _, final = row["answer"].rpartition("####")
        final = final.strip().replace(",", "")
        return row["question"], final, f"{_CALCULATION.sub('', work).strip()}\nThe answer is \\boxed{{{final}}}."
    raise ConfigError(
        f"row {uid} has none of the known layouts (question + answer with ####, problem + solution, "
        f"prompt + reward_model); it has {', '.join(row)}"
    )


def _final_of_math(uid: str, row: Mapping[str, Any]) -> str:
    if row.get("answer") is not None:
        return str(row["answer"])
    final = last_boxed(row.get("solution", ""))
    if final is None:
        raise ConfigError(f"row {uid} has neither an answer nor a solution with a \\boxed{{}}")
    return final


def last_boxed(text: str) -> str | None:
    """What is inside the last complete \\boxed{…}, or None."""
    start = text.rfind(_BOX)
    while start >= 0:
        inside = _up_to_closing_brace(text[start + len(_BOX) :])
        if inside is not None:
            return inside.strip()
        start = text.rfind(_BOX, 0, start)
    return None


def _up_to_closing_brace(text: str) -> str | None:
    depth = 1
    for place, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return text[:place]
    return None


def worked_out(expected: str, read: str) -> bool:
    """Whether a number that is expected is written there, and not a sum that comes to it: math-verify finds 15 + 43
    equal to 58, and a policy that is paid for it learns to repeat the question. A fraction may stand for a number that
    is not whole."""
    number = _number(expected)
    if number is None:
        return True
    read = _SEPARATOR.sub("", read)
    factors = (1, 100, 0.01) if "%" in expected + read else (1,)
    if any(math.isclose(float(found) * factor, number) for found in _NUMBER.findall(read) for factor in factors):
        return True
    final = read.rpartition("=")[2].strip()
    return bool(_SCIENTIFIC.fullmatch(final) or (number % 1 and _FRACTION.fullmatch(final)))


def _number(expected: str) -> float | None:
    """Without its sign and unit, if it is a single one."""
    gold = parse(f"\\boxed{{{expected.replace('%', '')}}}", parsing_timeout=0)
    return abs(float(gold[0])) if gold and getattr(gold[0], "is_Number", False) else None


def equivalent(expected: str, answer: str) -> tuple[bool, str]:
    """Whether math-verify finds the two equal, and the final answer it read in `answer`.

    Has no time limit of its own, because math-verify's needs the main thread: call it where it can be killed.
    ValueError if the expected answer itself cannot be read.
    """
    gold = parse(f"\\boxed{{{expected}}}", parsing_timeout=0)
    if not gold:
        raise ValueError(f"the expected answer {expected!r} cannot be read")
    read = parse(answer, parsing_timeout=0)
    return verify(gold, read, timeout_seconds=0), str(read[-1]).rstrip(".") if read else ""
