"""Error tokens: what is called repetition or garble, and what only looks like it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.flaws import COPIES, LONG, LOOP, flaws

PROSE = (
    "First add the two numbers in the bracket, which gives twelve, and then multiply by the three outside of it. "
    "The product is thirty-six. Dividing by four leaves nine, so the value of x must be nine. Checking: four times "
    "nine is thirty-six, and a third of that is twelve again, as it was in the bracket. The answer is 9."
)
TABLE = "| n | n² | n³ |\n|---|---|---|\n" + "".join(f"| {n} | {n**2} | {n**3} |\n" for n in range(1, 16))


def as_bytes(text: str) -> list[int]:
    return list(text.encode())


def as_words(text: str) -> list[int]:
    """A stand-in for BPE: words and the spaces before them are tokens."""
    vocabulary: dict[str, int] = {}
    return [vocabulary.setdefault(word, len(vocabulary)) for word in text.replace("\n", " \n ").split(" ")]


def found(text: str, *, cut_off: bool = False) -> set[tuple[str, ...]]:
    """For both kinds of tokens, which must agree."""
    return {flaws(tokens(text), text, cut_off=cut_off) for tokens in (as_bytes, as_words)}


@pytest.mark.parametrize("cut_off", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        PROSE,
        TABLE,
        "2^64 = 18446744073709551616",
        "10^60 = 1" + 60 * "0" + ", a number with sixty-one digits",
        "1/7 = 0.142857142857142857142857 and so on",
        "0, 0, 0, 0, 1, 0, 0, 0",
        "def f(x):\n    return x\n\n\n\ndef g(x):\n    return f(f(f(f(x))))\n",
        "Ha ha ha! No, no, no, no. The answer is 12.",
        "Title\n" + 60 * "=" + "\n" + PROSE,
        "∑ αᵢ·xᵢ ≤ ‖α‖·‖x‖, by Cauchy–Schwarz; Δx→0, 𝑥∈ℝ, 5 µm",
        "用Python写一个函数，返回x的平方。答えは１２です。人々ー・",
        "ˈsɪləbəl, with a stress mark",
        "Der Größe nach: naïve, façade, Žižek 👩‍👩‍👧 ✓ …",
        "Ответ: x = 12, потому что 3·4 = 12.",
        "Достоевский wrote it in Russian.",
    ],
)
def test_an_answer_in_order_has_no_flaw(text: str, cut_off: bool) -> None:
    assert found(text, cut_off=cut_off) == {()}


@pytest.mark.parametrize(
    "text",
    [
        PROSE + 40 * " so the answer is",
        PROSE + 30 * " 1",
        "wait," + 20 * " wait,",
        PROSE + 8 * (" " + PROSE[:60]),
    ],
)
def test_cut_off_in_a_loop_is_repetition(text: str) -> None:
    assert found(text, cut_off=True) == {("repetition",)}


def test_a_loop_is_repetition_also_if_the_answer_ended_or_the_loop_has_noise() -> None:
    words = PROSE.split()[:22]
    noise = random.Random(0)
    text = " ".join(word if noise.random() > 0.002 else "hm" for _ in range(40) for word in words)
    assert found(text) == {("repetition",)}


@pytest.mark.parametrize(
    "text",
    [
        "The value is \ufffd\ufffd 12",
        "The value \x00 is 12",
        "The value \x1b[31m is 12",
        "The value \ue000 is 12",  # private use
        "the theория of sets",
        "the sum ist सum of both",
        "so 答案 is является twelve",
        "مرحبا the ответ is 12",
    ],
)
def test_garble(text: str) -> None:
    assert found(text) == {("garble",)}


def test_a_character_cut_in_half_by_the_limit_is_no_garble() -> None:
    assert found("The answer is é\ufffd", cut_off=True) == {()}
    assert found("The answer is é\ufffd") == {("garble",)}


def test_both_at_once() -> None:
    assert found("x" + 40 * " \ufffd x", cut_off=True) == {("repetition", "garble")}


tokens = st.lists(st.integers(0, 300), max_size=60)


@given(tokens, st.lists(st.integers(0, 300), min_size=1, max_size=20), st.integers(COPIES, 12))
def test_any_loop_at_the_end_is_found_whatever_comes_before(before: list[int], block: list[int], copies: int) -> None:
    loop = block * copies + block[: len(block) // 2]
    if len(loop) >= LOOP:
        assert flaws(before + loop, "", cut_off=True) == ("repetition",)
    elif len(before + loop) < LOOP:
        assert flaws(before + loop, "", cut_off=True) == ()


@given(st.permutations(range(3 * LONG)), st.booleans())
def test_tokens_that_never_recur_never_repeat(answer: list[int], cut_off: bool) -> None:
    assert flaws(answer, "", cut_off=cut_off) == ()


@given(tokens, st.text(), st.booleans())
def test_anything_can_be_asked(answer: list[int], text: str, cut_off: bool) -> None:
    assert set(flaws(answer, text, cut_off=cut_off)) <= {"repetition", "garble"}
