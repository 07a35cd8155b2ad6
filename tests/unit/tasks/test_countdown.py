import json
import operator
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.tasks.countdown import Countdown, evaluate
from lockstep.types import Message, Sample

SYMBOLS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
SAMPLE = Sample(uid="train/0", messages=(Message("user", "?"),), answer="98", info={"numbers": [44, 19, 35]})

Tree = tuple[str, Fraction | None, list[int]]  # text, value (None after a division by zero), numbers


def join(pair: tuple[Tree, Tree], symbol: str) -> Tree:
    (left, a, used), (right, b, more) = pair
    undefined = a is None or b is None or (symbol == "/" and b == 0)
    value = None if undefined else SYMBOLS[symbol](a, b)
    return f"({left} {symbol} {right})", value, used + more


LEAVES = st.integers(0, 999).map(lambda n: (str(n), Fraction(n), [n]))
TREES = st.recursive(
    LEAVES, lambda inner: st.builds(join, st.tuples(inner, inner), st.sampled_from("+-*/")), max_leaves=8
)


@given(TREES)
def test_evaluate_is_exact(tree: Tree) -> None:
    text, value, numbers = tree
    if value is None:
        with pytest.raises(ValueError, match="divides by zero"):
            evaluate(text)
    else:
        assert evaluate(text) == (value, Counter(numbers))


@given(st.text(alphabet="0123456789+-*/() .eE_jx\n\0#'", max_size=40) | st.text(max_size=40))
def test_evaluate_never_does_anything_else(text: str) -> None:
    try:
        value, numbers = evaluate(text)
    except ValueError:
        return
    assert isinstance(value, Fraction)
    assert sum(numbers.values()) >= 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2**9",
        "7//2",
        "-3",
        "+3",
        "1.5",
        "__import__('os')",
        "1,2",
        "007",
        "3 4",
        "(" * 90 + "1",
        "1+" * 99,
        "9" * 201,
    ],
)
def test_evaluate_refuses(text: str) -> None:
    with pytest.raises(ValueError):
        evaluate(text)


def test_evaluate_reads_signs_of_print() -> None:
    assert evaluate("6 × 4 ÷ 2 − 2")[0] == 10


@given(st.integers(0, 2**32), st.integers(2, 5), st.booleans())
@settings(max_examples=30, deadline=None)
def test_made_up_puzzles_are_solvable_and_splits_disjoint(seed: int, numbers: int, use_all: bool) -> None:
    task = Countdown(min_numbers=2, max_numbers=numbers, use_all=use_all, seed=seed)
    keys = []
    for samples in (task.samples("train"), task.samples("eval"), task.demonstrations()):
        some = list(islice(samples, 20))
        keys.append({(*sorted(s.info["numbers"]), "->", s.answer) for s in some})
        for sample in some:
            assert task.reward(sample, sample.solution or "").parts == {"correct": 1.0, "format": 0.1}
            assert 1 <= int(sample.answer) <= 99
    assert len(set().union(*keys)) == sum(map(len, keys))


@pytest.mark.parametrize(
    ("answer", "correct", "reason"),
    [
        ("<answer>44 + (19 + 35)</answer>", 1.0, "correct: 44 + (19 + 35) is 98"),
        ("<answer>1</answer> no: <answer> 44+19+35 = 98 </answer>", 1.0, "correct: 44+19+35 is 98"),
        ("<answer>44 + 19</answer>", 0.0, "correct: 44 + 19 is 63, not 98"),
        ("<answer>44 / 19</answer>", 0.0, "correct: 44 / 19 is 44/19, not 98"),
        ("<answer>44 + 44 + 10</answer>", 0.0, "correct: uses 10, 44 more often than given in [44, 19, 35]"),
        ("<answer>98</answer>", 0.0, "correct: uses 98 more often than given in [44, 19, 35]"),
        ("<answer>44 / (19 - 19)</answer>", 0.0, "correct: 44 / (19 - 19) divides by zero"),
        (
            "<answer>open('x')</answer>",
            0.0,
            "correct: \"open('x')\" is not an expression of numbers, + - * / and parentheses",
        ),
        ("it is 98", 0.0, "correct: no <answer> </answer>"),
    ],
)
def test_reasons(answer: str, correct: float, reason: str) -> None:
    verdict = Countdown().reward(SAMPLE, answer)
    assert verdict.parts["correct"] == correct
    assert verdict.reasons[0] == reason


def test_use_all() -> None:
    sample = replace(SAMPLE, answer="63")
    assert Countdown().reward(sample, "<answer>44+19</answer>").parts["correct"] == 1.0
    strict = Countdown(use_all=True).reward(sample, "<answer>44+19</answer>")
    assert strict.reasons[0] == "correct: does not use 35"


def test_rows_of_both_layouts(tmp_path: Path) -> None:
    plain = {"nums": [44, 19, 35], "target": 98}
    verl = {
        "prompt": [{"role": "user", "content": "Make 98!"}],
        "reward_model": {"ground_truth": {"numbers": [44, 19, 35], "target": 98}},
        "answer": "<answer>44+19+35</answer>",
    }
    path = tmp_path / "puzzles.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (plain, verl)))
    task = Countdown(path=str(path), eval_path=str(path))
    first, second = task.samples("train")
    assert (first.info, first.answer) == (second.info, second.answer) == ({"numbers": [44, 19, 35]}, "98")
    assert "[44, 19, 35]" in first.messages[0].content
    assert second.messages == (Message("user", "Make 98!"),)
    assert [s.uid for s in task.demonstrations()] == ["train/1"]
