"""Countdown: combine the numbers with + - * / so that they make the target. Procedural, or from a dataset."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import Any, ClassVar

from lockstep.config import ConfigError
from lockstep.tasks._dataset import DatasetTask, first_of, read_messages
from lockstep.tasks._lazy import LazySamples, draw
from lockstep.tasks.judging import Part, combine
from lockstep.types import Message, Sample, Verdict

_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_SYMBOLS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_EXPRESSION = re.compile(r"[\d\s()+\-*/]{1,200}")
_PROMPT = (
    "Using the numbers {numbers}, create an expression that equals {target}. You can use basic arithmetic operations "
    "(+, -, *, /) and {rule}. Show your work, and return the final expression in <answer> </answer> tags, for example "
    "<answer>(1 + 2) / 3</answer>."
)


@dataclass(frozen=True, kw_only=True)
class Countdown(DatasetTask):
    fast: ClassVar[bool] = True  # an expression of at most 200 characters without powers

    path: str = ""
    """Dataset of puzzles with their numbers and targets; by default they are made up."""
    min_numbers: int = 3
    """Fewest numbers in a made-up puzzle."""
    max_numbers: int = 4
    """Most numbers in a made-up puzzle: the difficulty."""
    max_value: int = 99
    """Largest number and largest target in a made-up puzzle."""
    use_all: bool = False
    """Every number must be used exactly once, rather than at most once."""
    format_weight: float = 0.1
    """Reward added for an expression in <answer> tags, right or wrong."""
    num_train: int = 100_000
    """Made-up training puzzles; they are made as needed, so this costs nothing."""
    num_eval: int = 256
    """Made-up held-out puzzles."""
    seed: int = 0
    """Which puzzles are made up. The splits are disjoint even across seeds."""

    def __post_init__(self) -> None:
        if not 2 <= self.min_numbers <= self.max_numbers:
            raise ConfigError(f"countdown takes from {self.min_numbers} to {self.max_numbers} numbers: 2 <= min <= max")

    def samples(self, split: str) -> Sequence[Sample]:
        if self.path:
            return super().samples(split)
        sizes = {"train": self.num_train, "eval": self.num_eval}
        if split not in sizes:
            raise ConfigError(f"unknown split {split!r}; choices: {', '.join(sizes)}")
        return LazySamples(sizes[split], lambda i: self._make(split, i))

    def demonstrations(self) -> Sequence[Sample]:
        if self.path:
            return super().demonstrations()
        return LazySamples(self.num_train, lambda i: self._make("demonstrations", i))

    def sample(self, uid: str, row: Mapping[str, Any]) -> Sample:
        truth = row.get("reward_model", {}).get("ground_truth", row)
        numbers = list(first_of(truth, ("numbers", "nums")))
        target = first_of(truth, ("target",))
        prompt = row.get("prompt") or self._prompt(numbers, target)
        return _sample(uid, read_messages(prompt), numbers, target, row.get("answer"))

    def reward(self, sample: Sample, answer: str) -> Verdict:
        final = _last_answer(answer)
        if final is None:
            missing = "no <answer> </answer>"
            return combine(Part("correct", 0.0, missing), Part("format", 0.0, missing, self.format_weight))
        correct = self._judge_expression(sample, final.partition("=")[0].strip())
        return combine(correct, Part("format", 1.0, "an answer in its tags", self.format_weight))

    def _judge_expression(self, sample: Sample, expression: str) -> Part:
        try:
            value, used = evaluate(expression)
            _check_numbers(used, sample.info["numbers"], self.use_all)
        except ValueError as error:
            return Part("correct", 0.0, str(error))
        if value != int(sample.answer):
            return Part("correct", 0.0, f"{expression} is {value}, not {sample.answer}")
        return Part("correct", 1.0, f"{expression} is {sample.answer}")

    def _make(self, split: str, index: int) -> Sample:
        numbers, target, expression = draw(self.seed, split, index, self._propose, _key)
        prompt = self._prompt(numbers, target)
        solution = f"<answer>{expression}</answer>"
        return _sample(f"{split}/{index}", read_messages(prompt), numbers, target, solution)

    def _propose(self, random: Random) -> tuple[list[int], int, str]:
        """Numbers with a target they make, because an expression over all of them was built first."""
        while True:
            numbers = [
                random.randint(1, self.max_value) for _ in range(random.randint(self.min_numbers, self.max_numbers))
            ]
            value, expression = _random_expression(random, numbers)
            if value.denominator == 1 and 1 <= value <= self.max_value:
                return numbers, int(value), expression

    def _prompt(self, numbers: Sequence[int], target: int) -> str:
        rule = "each number must be used exactly once" if self.use_all else "each number can only be used once"
        return _PROMPT.format(numbers=list(numbers), target=target, rule=rule)


def _sample(
    uid: str, messages: tuple[Message, ...], numbers: Sequence[int], target: int, solution: str | None
) -> Sample:
    return Sample(uid=uid, messages=messages, answer=str(target), solution=solution, info={"numbers": list(numbers)})


def _last_answer(text: str) -> str | None:
    before, end, _ = text.rpartition("</answer>")
    _, start, inside = before.rpartition("<answer>")
    return inside if start and end else None


def _key(puzzle: tuple[list[int], int, str]) -> str:
    """The order of the numbers does not make another puzzle."""
    numbers, target, _ = puzzle
    return f"{sorted(numbers)} -> {target}"


def _random_expression(random: Random, numbers: Sequence[int]) -> tuple[Fraction, str]:
    """Joins two random pieces until one is left; the value is 0 if a division by zero came up."""
    pieces = [(Fraction(n), str(n)) for n in numbers]
    while len(pieces) > 1:
        random.shuffle(pieces)
        (left, left_text), (right, right_text) = pieces.pop(), pieces.pop()
        symbol = random.choice("+-*/")
        if symbol == "/" and right == 0:
            return Fraction(0), ""
        pieces.append((_SYMBOLS[symbol](left, right), f"({left_text} {symbol} {right_text})"))
    value, text = pieces[0]
    return value, text[1:-1]


def evaluate(expression: str) -> tuple[Fraction, Counter[int]]:
    """The exact value of an expression of whole numbers, + - * / and parentheses, and the numbers it uses.

    ValueError says what is wrong with it. The text is parsed, never executed.
    """
    text = expression.translate({ord("×"): "*", ord("÷"): "/", ord("−"): "-"})
    if not _EXPRESSION.fullmatch(text):
        raise ValueError(f"{expression[:40]!r} is not an expression of numbers, + - * / and parentheses")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, MemoryError, RecursionError):  # the last two: parentheses nested too deep
        raise ValueError(f"{expression[:40]!r} is not a well-formed expression") from None
    return _value(tree), Counter(_numbers(tree))


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATIONS:
        raise ValueError(f"{ast.unparse(node)[:40]!r} uses something else than + - * / between numbers")
    try:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    except ZeroDivisionError:
        raise ValueError(f"{ast.unparse(node)[:40]} divides by zero") from None


def _numbers(tree: ast.expr) -> Iterator[int]:
    return (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, int))


def _check_numbers(used: Counter[int], given: Sequence[int], use_all: bool) -> None:
    allowed = Counter(given)
    if extra := used - allowed:
        raise ValueError(f"uses {', '.join(map(str, sorted(extra)))} more often than given in {list(given)}")
    if use_all and (left := allowed - used):
        raise ValueError(f"does not use {', '.join(map(str, sorted(left)))}")
