"""The governor: judges a run by its own metrics once a step, before the weights move, and tells or acts.

`Governor` decides which rules fire; it is a function of the metrics alone, so a finished run can be judged again from
its log. What they ask for is done in `steward`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator

from lockstep.config import Config, ConfigError
from lockstep.controller.rules import Rule, parse, widest
from lockstep.controller.signals import Signals

DEFAULT = "default"
DEFAULT_RULES = (
    "drift: raise_correction, raise_precision, lower_rate when mismatch/prob0.1/f2 > 0.2 over 3 steps"
    " and mismatch/prob0.1/tokens > 5 over 3 steps and mismatch/lag0/pearson < 0.97 over 3 steps"
    " and mismatch/lag0/k3 > 0.002 over 3 steps",
    "apart: raise_correction, raise_precision, lower_rate when mismatch/lag0/k3 > 0.01 over 3 steps"
    " and mismatch/lag0/k3 > 2 x early over 3 steps and mismatch/lag0/f2 > 2 x early over 3 steps for 3 steps",
    "stale: lower_staleness when rollout/lag_mean > 0 and mismatch/k3 > 0.01 over 3 steps"
    " and mismatch/k3 > 2 x early over 3 steps and mismatch/f2 > 2 x early over 3 steps for 3 steps",
    "outlier: skip_update when mismatch/ess < 0.2",
    "endless: warn when rollout/truncated > 0.5 and rollout/truncated rising",
)


class GovernorConfig(Config):
    """Rules on a run's metrics that tell, or act, when something goes wrong; docs/governor.md has their grammar."""

    mode: Literal["off", "advisory", "active"] = "advisory"
    """off looks at no rule, advisory tells what it would do, active does it"""
    rules: tuple[str, ...] = (DEFAULT,)
    """such as `stop when reward/mean < 0.5 x early for 5 steps`; the word `default` stands for the shipped ones"""
    cooldown: int = Field(default=10, ge=1)
    """steps from one firing of a rule to its next, at least"""

    @field_validator("rules")
    @classmethod
    def _readable(cls, rules: tuple[str, ...]) -> tuple[str, ...]:
        named = [rule.name for rule in map(parse, _expand(rules)) if rule.name]
        _refuse_repeated(rules, "the rule {!r} is given twice")
        _refuse_repeated(named, "two rules are called {!r}: give one of them another name")
        return rules

    @property
    def watched(self) -> Set[str]:
        """The metrics its rules look at."""
        return widest(rule.condition.windows() for rule in self.parsed()).keys()

    def parsed(self) -> list[Rule]:
        return [parse(text) for text in _expand(self.rules)] if self.mode != "off" else []


def _expand(rules: Iterable[str]) -> list[str]:
    """The shipped ones where `default` stands."""
    return [text for rule in rules for text in (DEFAULT_RULES if rule == DEFAULT else (rule,))]


def _refuse_repeated(found: Iterable[str], complaint: str) -> None:
    for item, count in Counter(found).items():
        if count > 1:
            raise ConfigError(complaint.format(item))


@dataclass(frozen=True, slots=True)
class Firing:
    rule: Rule
    reason: str  # the metrics it looks at, as they stand


class Governor:
    """Which rules fire. One that did waits for `cooldown` steps, but if it skips updates it goes on doing so."""

    def __init__(self, rules: Sequence[Rule], cooldown: int) -> None:
        self.rules, self._cooldown = rules, cooldown
        self._signals = Signals(widest(rule.condition.windows() for rule in rules))
        self._held: dict[str, int] = {}  # steps in a row for which a rule's condition has held
        self._fired: dict[str, int] = {}  # when it last fired

    @property
    def watched(self) -> Set[str]:
        """The metrics its rules look at."""
        return self._signals.windows.keys()

    def judge(self, step: int, metrics: Mapping[str, float]) -> tuple[list[Firing], bool]:
        """The rules that fire at this step, and whether any asks to skip its update."""
        self._signals.add(metrics)
        holding = [rule for rule in self.rules if self._holds(rule)]
        fresh = [rule for rule in holding if step >= self.speaks_again(rule)]
        self._fired |= {rule.text: step for rule in fresh}
        skip = any("skip_update" in rule.actions for rule in holding)
        return [Firing(rule, self._reason(rule)) for rule in fresh], skip

    def speaks_again(self, rule: Rule) -> int:
        """The first step at which it may fire."""
        return self._fired[rule.text] + self._cooldown if rule.text in self._fired else 0

    def _holds(self, rule: Rule) -> bool:
        holds = rule.condition.holds(self._signals)
        if holds is None:
            return False
        self._held[rule.text] = self._held.get(rule.text, 0) + 1 if holds else 0
        return self._held[rule.text] >= rule.steps

    def _reason(self, rule: Rule) -> str:
        return ", ".join(rule.condition.tell(self._signals))

    def state(self) -> dict[str, Any]:
        return {"signals": self._signals.state(), "held": dict(self._held), "fired": dict(self._fired)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Rules are known by their text: one that the recipe has changed since starts afresh."""
        self._signals.load(state["signals"])
        self._held, self._fired = dict(state["held"]), dict(state["fired"])
