"""The language of rules: what it reads, what it refuses, and what conditions say of a series of metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.assembly.recipe import Recipe
from lockstep.config import ConfigError
from lockstep.config.loading import validate
from lockstep.controller.governor import DEFAULT_RULES
from lockstep.controller.rules import ACTIONS, COMPARE, Among, Comparison, Rule, Trend, parse
from lockstep.controller.signals import EARLY, Signals

NAMES = ("mismatch/k3", "mismatch/f2", "policy/entropy", "reward/part/correct")


def seen(rule: Rule, **series: Sequence[float | None]) -> bool | None:
    """What the condition says after these values of `mismatch/NAME`; None: not logged in that step."""
    signals = Signals(rule.condition.windows())
    for values in zip(*series.values(), strict=True):
        row = {f"mismatch/{name}": value for name, value in zip(series, values, strict=True) if value is not None}
        signals.add(row)
    return rule.condition.holds(signals)


def test_a_rule_says_what_to_do_and_when() -> None:
    rule = parse("drift: stop, warn when mismatch/k3 > 1e-2 and (mismatch/f2 rising or mismatch/ess < 0.9) for 3 steps")
    either = Among(1, (Trend("mismatch/f2", True, 10), Comparison("mismatch/ess", "<", 0.9, False)))
    assert rule.condition == Among(2, (Comparison("mismatch/k3", ">", 0.01, False), either))
    assert (rule.name, rule.label, rule.actions, rule.steps) == ("drift", "drift", ("stop", "warn"), 3)


def test_and_binds_closer_than_or() -> None:
    a, b, c = (f"mismatch/{name} > 0" for name in ("k3", "f2", "ess"))
    unclear, first, last = f"{a} or {b} and {c}", f"({a} or {b}) and {c}", f"{a} or ({b} and {c})"
    conditions = [parse(f"warn when {text}").condition for text in (unclear, first, last)]
    assert conditions[0] == conditions[2] != conditions[1]


def test_spaces_are_free() -> None:
    loose = parse("warn  when mismatch/k3 >= 3 x early for 1 step")
    tight = parse("warn when mismatch/k3>=3x early for 1 step")
    assert (loose.condition, loose.steps) == (tight.condition, tight.steps)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "unknown action 'the end'"),
        ("shout when mismatch/k3 > 1", "unknown action 'shout'.*choices: warn, "),
        ("stpo when mismatch/k3 > 1", "did you mean 'stop'"),
        ("warn mismatch/k3 > 1", "expected 'when', found 'mismatch/k3'"),
        ("warn when mismatch/k4 > 1", "unknown metric 'mismatch/k4': did you mean 'mismatch/k"),
        ("warn when kl > 1", "unknown metric 'kl': known: .*mismatch/…"),
        ("warn when mismatch/k3 = 1", "cannot read '= 1'"),
        (
            "warn when mismatch/k3 above 1",
            "after 'mismatch/k3' expected >, >=, <, <=, rising or falling, found 'above'",
        ),
        ("warn when mismatch/k3 > much", "expected a number, found 'much'"),
        ("warn when mismatch/k3 > 1e999", "expected a finite number"),
        ("warn when mismatch/k3 > 2 x", "expected 'early', found 'the end'"),
        ("warn when mismatch/k1 > -2 x early", "-2 x early: a multiple cannot be negative"),
        ("warn when mismatch/k3 > 1 over 0 steps", "steps from 1 to 1000, found '0'"),
        ("warn when mismatch/k3 > 1 for 0 steps", "steps from 1 to 1000, found '0'"),
        ("warn when mismatch/k3 > 1 for 3", "expected 'steps', found 'the end'"),
        ("warn when mismatch/k3 rising over 2 steps", "at least 4"),
        ("warn when (mismatch/k3 > 1", r"expected '\)', found 'the end'"),
        ("warn when 3 of (mismatch/k3 > 1, mismatch/f2 > 1)", "3 of 2 conditions"),
        ("warn when mismatch/k3 > 1 mismatch/f2 > 1", "expected 'the end', found 'mismatch/f2'"),
        ("warn when " + "(" * 40, "brackets within brackets"),
        ("warn when mismatch/k3 > " + "1" * 2000, "longer than 1000 characters"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse(text)


def test_a_recipe_with_a_bad_rule_is_refused_at_load() -> None:
    tables = {"model": {"path": "x"}, "task": "math", "algorithm": {"surrogate": "grpo"}, "train": {"steps": 1}}
    with pytest.raises(ConfigError, match=r"governor\.rules: rule 'warn when mismatch/k5 > 1': unknown metric"):
        validate(Recipe, {**tables, "governor": {"rules": ["default", "warn when mismatch/k5 > 1"]}}, "my.toml")


words = st.sampled_from([*ACTIONS, *COMPARE, *NAMES, *"(),:", "when", "and", "or", "of", "for", "steps", "x", "early"])
soup = st.lists(words | st.sampled_from(["1", "3", "0.5", "-1e3", "rising", "over", "²", "\x00"]), max_size=30)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60) | soup.map(" ".join) | soup.map(lambda tail: f"warn when {' '.join(tail)}"))
def test_garbage_is_refused_and_nothing_worse(text: str) -> None:
    with suppress(ConfigError):
        parse(text)


numbers = st.floats(-1e6, 1e6)
spans = st.integers(1, 5)
comparisons = st.builds(
    Comparison, st.sampled_from(NAMES), st.sampled_from([*COMPARE]), numbers, st.just(False), spans
) | st.builds(Comparison, st.sampled_from(NAMES), st.sampled_from([*COMPARE]), numbers.map(abs), st.just(True), spans)
trends = st.builds(Trend, st.sampled_from(NAMES), st.booleans(), st.integers(4, 30))
conditions = st.recursive(
    comparisons | trends,
    lambda parts: st.lists(parts, min_size=2, max_size=4).flatmap(
        lambda found: st.builds(Among, st.integers(1, len(found)), st.just(tuple(found)))
    ),
    max_leaves=6,
)


def written(condition: object) -> str:
    match condition:
        case Comparison(metric, sign, bound, relative, window):
            span = f" over {window} step{'s' * (window > 1)}"
            return f"{metric} {sign} {bound!r}" + (" x early" if relative else "") + span
        case Trend(metric, rising, window):
            return f"{metric} {'rising' if rising else 'falling'} over {window} steps"
        case Among(needed, parts):
            return f"{needed} of ({', '.join(map(written, parts))})"
    raise AssertionError(condition)


@given(conditions)
def test_every_condition_can_be_written_and_is_read_back(condition: Comparison | Trend | Among) -> None:
    assert parse(f"warn when {written(condition)}").condition == condition


@given(conditions, st.lists(st.dictionaries(st.sampled_from(NAMES), st.floats(width=32)), max_size=40))
def test_a_condition_says_yes_or_no_of_anything_logged(condition: Comparison, rows: list[dict[str, float]]) -> None:
    signals = Signals(condition.windows())
    for row in rows:
        signals.add(row)
    assert condition.holds(signals) in (True, False, None)
    signals.add({})
    assert condition.holds(signals) is None, "without a new value nothing is concluded"


def test_early_is_the_median_of_the_first_values_and_unknown_before() -> None:
    rule = parse("warn when mismatch/k3 > 3 x early")
    early = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 90.0, 90.0]
    assert not seen(rule, k3=early[:-1])
    assert seen(rule, k3=early)
    assert not seen(rule, k3=[*early, 2.9])
    assert seen(rule, k3=[*early, 2.9, 3.1])


@pytest.mark.parametrize(
    ("condition", "k3", "f2", "holds"),
    [
        ("mismatch/k3 > 1", [2.0, None], [0.0, 0.0], None),
        ("mismatch/k3 > 1 and mismatch/f2 > 1", [2.0, None], [2.0, 2.0], None),
        ("mismatch/k3 > 1 and mismatch/f2 > 1", [2.0, None], [2.0, 0.0], False),  # whatever k3 would be
        ("mismatch/k3 > 1 or mismatch/f2 > 1", [2.0, None], [2.0, 2.0], True),
        ("mismatch/k3 > 1 or mismatch/f2 > 1", [2.0, None], [2.0, 0.0], None),
        ("mismatch/k3 rising over 4 steps", [1, 2, 3, 4, None], [0] * 5, None),
        ("mismatch/k3 rising over 4 steps", [1, 2, None, 3, None, 4], [0] * 6, True),  # over the values there are
        ("mismatch/k3 > 2 over 2 steps", [2, None, 3], [0] * 3, True),
    ],
)
def test_a_metric_that_this_step_has_not_logged_leaves_its_test_open(
    condition: str, k3: list[float | None], f2: list[float], holds: bool | None
) -> None:
    assert seen(parse(f"warn when {condition}"), k3=k3, f2=f2) is holds


def test_over_steps_the_mean_is_compared() -> None:
    rule = parse("warn when mismatch/k3 > 2 over 3 steps")
    assert not seen(rule, k3=[9, 9])  # too few
    assert not seen(rule, k3=[9, 1, 1, 4])
    assert seen(rule, k3=[0, 1, 1, 5])
    assert seen(parse("warn when mismatch/k3 > 2 x early over 2 steps"), k3=[1.0] * EARLY + [1.5, 2.6])


def test_a_multiple_of_a_negative_early_value_lies_as_far_from_it_as_of_a_positive_one() -> None:
    grown, fallen = parse("warn when mismatch/k1 > 2 x early"), parse("warn when mismatch/k1 < 0.5 x early")
    early = [-1.0] * EARLY
    assert [seen(grown, k1=[*early, k1]) for k1 in (-1, -0.1, 0.1)] == [False, False, True]
    assert [seen(fallen, k1=[*early, k1]) for k1 in (-1, -1.4, -1.6)] == [False, False, True]


def test_nan_is_no_value_and_infinity_is_one() -> None:
    assert seen(parse("warn when mismatch/k3 > 1 or mismatch/k3 <= 1"), k3=[math.nan]) is None
    assert seen(parse("warn when mismatch/k3 > 1"), k3=[0.0, math.inf])
    assert not seen(parse("warn when mismatch/k3 > 1 over 2 steps"), k3=[-math.inf, math.inf])


def test_a_trend_needs_most_pairs_to_go_its_way() -> None:
    rising = parse("warn when mismatch/k3 rising over 6 steps")
    assert seen(rising, k3=[9, 9, 9, 1, 2, 3, 5, 4, 6])
    assert not seen(rising, k3=[1, 2, 3, 4, 5])  # too few
    assert not seen(rising, k3=[1, 6, 2, 5, 3, 4])
    assert not seen(rising, k3=[1, 1, 1, 1, 1, 1])
    assert seen(parse("warn when mismatch/k3 falling over 4 steps"), k3=[4, 3, 2, 1])


def test_shipped_rules_can_be_read_and_have_names() -> None:
    assert all(parse(text).name for text in DEFAULT_RULES)
    assert EARLY >= 5
