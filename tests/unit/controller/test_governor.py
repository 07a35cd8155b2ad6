"""The governor in the loop, with fakes for every role: each action, told and done, and across a resume."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError
from test_loop import Lab

from lockstep.controller.governor import DEFAULT_RULES, Governor, GovernorConfig
from lockstep.controller.rules import ACTIONS, parse
from lockstep.controller.steward import Changes, Halted

ALWAYS = "mismatch/k3 >= 0"


def lab(folder: Path, rule: str, mode: str = "active", cooldown: int = 100, **train: int) -> Lab:
    made = Lab(folder, **train)
    made.governor = GovernorConfig.model_validate({"mode": mode, "rules": [rule], "cooldown": cooldown})
    return made


def told(made: Lab) -> list[tuple[int, str]]:
    return [(step, text) for step, kind, text in made.recorder.events if kind == "governor"]


def rows(values: Sequence[float | None]) -> Iterator[tuple[int, dict[str, float]]]:
    """Steps with their metrics; None: the step logs none."""
    return ((step, {} if value is None else {"mismatch/k3": value}) for step, value in enumerate(values, 1))


def firings(governor: Governor, values: Sequence[float | None]) -> list[int]:
    return [step for step, row in rows(values) if governor.judge(step, row)[0]]


def test_a_rule_fires_after_its_steps_in_a_row_and_then_cools_down() -> None:
    governor = Governor([parse("warn when mismatch/k3 > 1 for 2 steps")], cooldown=4)
    assert firings(governor, [2, 0, 2, 2, 2, 2, 2, 2, 0, 0, 0, 2, 2]) == [4, 8, 13]


@pytest.mark.parametrize(
    ("values", "fired"),
    [
        ([2, None, None, None], []),  # one measurement is one step
        ([2, None, 2, None, 2], [5]),  # steps without one neither count nor break the row
        ([2, None, 2, 0, 2, 2], []),
    ],
)
def test_only_steps_that_log_a_metric_count(values: list[float | None], fired: list[int]) -> None:
    assert firings(Governor([parse("warn when mismatch/k3 > 1 for 3 steps")], cooldown=1), values) == fired


def test_a_step_without_the_metric_is_not_skipped_for_what_an_earlier_one_logged() -> None:
    governor = Governor([parse("outlier: skip_update when mismatch/k3 > 1")], cooldown=1)
    judged = [governor.judge(step, row) for step, row in rows([2, None, None, 0, 2])]
    assert [bool(fired) for fired, _ in judged] == [skip for _, skip in judged] == [True, False, False, False, True]


def test_steps_without_tokens_of_lag_zero_leave_the_shipped_rules_silent() -> None:
    """A run that samples ahead: one bad step with lag-0 tokens, then none with any."""
    governor = Governor([parse(text) for text in DEFAULT_RULES], cooldown=1)
    bad = {"mismatch/lag0/k3": 1.0, "mismatch/lag0/f2": 1.0, "mismatch/lag0/pearson": 0.0, "mismatch/lag0/ess": 0.0}
    good = {"mismatch/k3": 1e-3, "mismatch/ess": 0.9, "mismatch/prob0.1/f2": 0.5, "rollout/lag_mean": 2.0}
    assert [governor.judge(step, {**good, **(bad if step == 1 else {})}) for step in range(1, 30)] == [([], False)] * 29


def test_a_run_goes_on_after_one_outlier(tmp_path: Path) -> None:
    made = lab(tmp_path, "outlier: skip_update when mismatch/ess < 0.2")
    made.learner.measured = lambda step: {"mismatch/ess": 0.1} if step == 1 else {}
    made.run()
    assert len(made.learner.trained) == 5


def test_rules_do_not_silence_each_other() -> None:
    governor = Governor([parse(f"warn when mismatch/k3 > {bound}") for bound in (1, 2)], cooldown=10)
    assert [len(governor.judge(step, {"mismatch/k3": value})[0]) for step, value in ((1, 1.5), (2, 3), (3, 3))] == [
        1,
        1,
        0,
    ]


def test_the_word_default_stands_for_the_shipped_rules() -> None:
    config = GovernorConfig(rules=("default", "stop when reward/mean < 0"))
    assert [rule.text for rule in config.parsed()] == [*DEFAULT_RULES, "stop when reward/mean < 0"]
    assert GovernorConfig(mode="off").parsed() == []


@pytest.mark.parametrize(
    ("rules", "complaint"),
    [
        (("default", "default"), "the rule 'default' is given twice"),
        (("warn when reward/mean < 0",) * 2, "the rule 'warn when reward/mean < 0' is given twice"),
        (("default", "drift: warn when reward/mean < 0"), "two rules are called 'drift': give one of them another"),
    ],
)
def test_rules_that_events_could_not_tell_apart_are_refused(rules: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        GovernorConfig(rules=rules)


def test_off_says_nothing(tmp_path: Path) -> None:
    made = lab(tmp_path, f"stop when {ALWAYS}", "off")
    assert made.run().step == 6
    assert told(made) == []


@pytest.mark.parametrize(
    ("action", "would"),
    [
        ("warn", "warning"),
        ("raise_correction", "would raise the correction to icepop"),
        ("lower_staleness", "would lower max_staleness to 1"),
        ("raise_precision", "would raise the precision of sampling to int8_w8a8"),
        ("lower_rate", "would lower the learning rate to 0.25"),
        ("skip_update", "would skip the update"),
        ("stop", "would stop the run"),
    ],
)
def test_an_advisor_tells_and_touches_nothing(tmp_path: Path, action: str, would: str) -> None:
    made = lab(tmp_path, f"{action} when {ALWAYS}", "advisory", cooldown=4, max_staleness=2)
    made.precisions = ("int8_w8a8", "high")
    controller = made.controller()
    assert made.run(controller).step == 6
    assert told(made) == [(step, f"{ALWAYS}: {would}; mismatch/k3 0") for step in (1, 5)]
    assert (len(made.learner.trained), made.learner.correction, controller.gate.max_staleness) == (6, "tis", 2)
    assert made.learner.learning_rate == 1


def test_the_correction_is_raised_rung_by_rung(tmp_path: Path) -> None:
    made = lab(tmp_path, f"raise_correction when {ALWAYS}", cooldown=2)
    made.run()
    assert made.learner.correction == "mis"
    whats = [text.split(": ")[1] for _, text in told(made)]
    assert whats == [
        "raised the correction to icepop; mismatch/k3 0",
        "raised the correction to mis; mismatch/k3 0",
        "cannot raise the correction",
    ]


def test_the_learning_rate_is_lowered_to_a_64th(tmp_path: Path) -> None:
    made = lab(tmp_path, f"lower_rate when {ALWAYS}", cooldown=1)
    progress = made.run()
    assert made.learner.learning_rate == Changes.of(progress.governor).learning_rate == 1 / 64
    whats = [text.split(": ", 1)[1].partition(";")[0] for _, text in told(made)]
    assert whats[:3] == [f"lowered the learning rate to {rate}" for rate in ("0.25", "0.0625", "0.015625")]
    assert set(whats[3:]) == {"cannot lower the learning rate: 0.015625 is already 0.016 of 1"}


def test_two_rules_that_want_the_same_get_it_once(tmp_path: Path) -> None:
    made = Lab(tmp_path)
    rules = (f"raise_correction when {ALWAYS}", f"again: raise_correction when {ALWAYS}")
    made.governor = GovernorConfig(mode="active", rules=rules, cooldown=100)
    made.run()
    assert made.learner.correction == "icepop"
    assert [text.partition(":")[0] for _, text in told(made)] == [ALWAYS, "again"]


def test_staleness_is_lowered_and_its_bound_holds(tmp_path: Path) -> None:
    made = lab(tmp_path, f"lower_staleness when {ALWAYS}", cooldown=2, max_staleness=2, steps=12)
    controller = made.controller()
    made.run(controller)
    assert controller.gate.max_staleness == 0
    assert max(made.learner.lags) <= 2
    assert max(made.learner.lags[-16:]) == 0
    assert "cannot lower max_staleness: it is 0" in told(made)[-1][1]


def test_precision_is_raised_rung_by_rung_by_runs_that_end_to_be_built_anew(tmp_path: Path) -> None:
    made = lab(tmp_path, f"raise_precision when {ALWAYS}", cooldown=2)
    made.precisions = ("int8_w8a8", "high")
    ended: list[tuple[int, str | None, bool]] = []
    whats: list[str] = []
    for _ in range(3):
        made.renew()
        controller = made.controller()
        progress = made.run(controller)
        ended.append((progress.step, Changes.of(progress.governor).precision, controller.to_be_rebuilt))
        whats += [text.split(": ", 1)[1] for _, text in told(made)]
    assert ended == [(1, "int8_w8a8", True), (3, "high", True), (6, "high", False)]
    assert whats == [
        "raised the precision of sampling to int8_w8a8; mismatch/k3 0",
        "raised the precision of sampling to high; mismatch/k3 0",
        "cannot raise the precision of sampling: it is the learner's own; mismatch/k3 0",
    ]


@pytest.mark.parametrize(
    ("resumed_with", "then"),
    [(("int8_w8a8", "high"), "high"), (("high",), "high"), ((), None)],  # as recipes in 4, 8 and all bits give
)
def test_a_run_resumed_with_another_precision_climbs_from_where_it_stands(
    tmp_path: Path, resumed_with: tuple[str, ...], then: str | None
) -> None:
    """It was at 8 bits: not a number of rungs, which would mean something else on a shorter ladder."""
    made = lab(tmp_path, f"raise_precision when {ALWAYS}", cooldown=1)
    made.precisions = ("int8_w8a8", "high")
    assert Changes.of(made.run().governor).precision == "int8_w8a8"
    made.renew()
    made.precisions = resumed_with
    made.run()
    assert (
        told(made)[0][1]
        .split(": ", 1)[1]
        .startswith(f"raised the precision of sampling to {then}" if then else "cannot raise the precision of sampling")
    )


@pytest.mark.parametrize(("resumed_with", "bound"), [(3, 1), (2, 1), (1, 1), (0, 0)])
def test_a_run_resumed_with_another_staleness_keeps_to_the_lower_bound(
    tmp_path: Path, resumed_with: int, bound: int
) -> None:
    made = lab(tmp_path, f"lower_staleness when {ALWAYS}", steps=2, max_staleness=2)
    made.run()
    again = lab(tmp_path, f"lower_staleness when {ALWAYS}", steps=4, max_staleness=resumed_with)
    controller = again.controller()
    again.run(controller)
    assert (controller.gate.max_staleness, told(again)) == (bound, [])


def test_a_request_to_stop_is_stronger_than_a_raised_precision(tmp_path: Path) -> None:
    made = lab(tmp_path, f"raise_precision when {ALWAYS}")
    made.precisions = ("int8_w8a8",)
    controller = made.controller()
    made.learner.on_step = lambda step: controller.stop()
    assert (made.run(controller).step, controller.to_be_rebuilt) == (1, False)


def test_precision_of_a_sampler_like_the_learner_cannot_be_raised(tmp_path: Path) -> None:
    made = lab(tmp_path, f"raise_precision when {ALWAYS}")
    made.run()
    assert "cannot raise the precision of sampling: it is the learner's own" in told(made)[0][1]


def test_updates_are_skipped_for_as_long_as_the_condition_holds(tmp_path: Path) -> None:
    made = lab(tmp_path, "skip_update when mismatch/k3 > 1")
    made.learner.measured = lambda step: {"mismatch/k3": 2.0 if step in (2, 3) else 0.0}
    progress = made.run()
    assert (progress.step, progress.version, len(made.learner.trained)) == (6, 6, 4)
    assert told(made) == [(3, "mismatch/k3 > 1: skipped the update; mismatch/k3 2")]  # told once, done twice
    assert (3, "idle", "this step moved no weight: a rule of the governor asked for it") in made.recorder.events


def test_a_stop_saves_before_the_update_and_says_why(tmp_path: Path) -> None:
    made = lab(tmp_path, "trouble: stop when mismatch/k3 > 1")
    made.learner.measured = lambda step: {"mismatch/k3": float(step)}
    with pytest.raises(Halted, match="trouble: stopped the run; mismatch/k3 2"):
        made.run()
    found = made.checkpoints.latest()
    assert found is not None
    assert (found[1].step, len(made.learner.trained)) == (3, 2)
    made.renew()
    assert made.run().step == 6, "a resumed run does not stop at once for the same reason"
    assert (3, "cooldown", "the rule that stopped the run is silent until step 103: trouble") in made.recorder.events


def test_rewards_and_last_steps_losses_can_be_judged(tmp_path: Path) -> None:
    """Receipts are complete before the update; a loss is not, so it counts at the step after."""
    made = lab(tmp_path, "warn when reward/mean >= 0.5 and policy/loss >= 0.5")
    made.run()
    assert told(made)[0] == (2, "reward/mean >= 0.5 and policy/loss >= 0.5: warning; reward/mean 0.5, policy/loss 0.5")


def test_evaluations_can_be_judged(tmp_path: Path) -> None:
    made = lab(tmp_path, "warn when eval/accuracy > 0.5")
    made.eval_every, made.accuracy = 2, lambda step: step / 6
    made.run()
    assert [step for step, _ in told(made)] == [5]


def test_what_it_knows_and_has_changed_survives_a_resume(tmp_path: Path) -> None:
    """Stopped and resumed anywhere, it says and does what it would have done."""
    rules = ["lower_staleness when mismatch/k3 rising over 4 steps", "warn when mismatch/k3 > 5 x early for 2 steps"]

    def governed(folder: Path) -> Lab:
        made = Lab(folder, steps=14, max_staleness=2)
        made.governor = GovernorConfig(mode="active", rules=tuple(rules), cooldown=5)
        return made

    def values(made: Lab) -> None:
        made.learner.measured = lambda step: {"mismatch/k3": float(step)}

    whole, broken = governed(tmp_path / "whole"), governed(tmp_path / "broken")
    values(whole)
    whole.run()
    events: list[tuple[int, str]] = []
    for stop in (3, 9, 99):
        broken.renew()
        values(broken)
        controller = broken.controller()
        broken.learner.on_step = lambda step, c=controller, at=stop: c.stop() if step + 1 == at else None
        broken.run(controller)
        events += told(broken)
    assert events == told(whole)
    assert len(events) >= 3
    assert controller.gate.max_staleness == 0


def test_the_page_has_the_shipped_rules_and_an_example_that_loads() -> None:
    page = (Path(__file__).parents[3] / "docs/governor.md").read_text(encoding="utf-8")
    rules = [parse(text) for text in DEFAULT_RULES]
    assert re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", page, re.MULTILINE) == [
        (rule.name, ", ".join(f"`{action}`" for action in rule.actions)) for rule in rules
    ]
    assert all(f"| `{action}` |" in page for action in ACTIONS)
    example = tomllib.loads(page.partition("```toml\n")[2].partition("```")[0])
    assert len(GovernorConfig.model_validate(example["governor"]).parsed()) == len(rules) + 2


def test_the_rate_a_run_began_with_is_kept(tmp_path: Path) -> None:
    """The least rate is a share of it, whatever the recipe of a resumed run says."""
    made = lab(tmp_path, f"lower_rate when {ALWAYS}", cooldown=100)
    state = made.run().governor
    changes = Changes.of(state)
    assert (changes.full_rate, changes.learning_rate) == (1.0, 0.25)
