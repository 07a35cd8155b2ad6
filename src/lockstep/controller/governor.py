"""The governor: judges a run by its own metrics once a step, before the weights move, and tells or acts.

`Governor` decides which rules fire; it is a function of the metrics alone, so a finished run can be judged again from
its log. `Steward` does what they ask for, or in advisory mode says what it would have done. Each firing is an event.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field, field_validator

from lockstep.config import Config
from lockstep.controller.gate import Gate
from lockstep.controller.rules import Rule, Signals, parse, widest
from lockstep.protocols import GOVERNOR, Learner, Recorder

DEFAULT = "default"
DEFAULT_RULES = (
    "drift: raise_correction, raise_precision when mismatch/prob0.1/f2 > 0.2 over 3 steps"
    " and mismatch/prob0.1/tokens > 5 over 3 steps and mismatch/lag0/pearson < 0.97 over 3 steps"
    " and mismatch/lag0/k3 > 0.002 over 3 steps",
    "apart: raise_correction, raise_precision when mismatch/lag0/k3 > 0.01 over 3 steps"
    " and mismatch/lag0/k3 > 2 x early over 3 steps and mismatch/lag0/f2 > 2 x early over 3 steps for 3 steps",
    "stale: lower_staleness when rollout/lag_mean > 0 and mismatch/k3 > 0.01 over 3 steps"
    " and mismatch/k3 > 2 x early over 3 steps and mismatch/f2 > 2 x early over 3 steps for 3 steps",
    "outlier: skip_update when mismatch/ess < 0.2",
    "endless: warn when rollout/truncated > 0.5 and rollout/truncated rising",
)


class GovernorConfig(Config):
    """Rules on a run's metrics that tell, or act, when something goes wrong; docs/governor.md has their grammar."""

    mode: Literal["off", "advisory", "active"] = "advisory"
    """advisory tells what it would do, active does it"""
    rules: tuple[str, ...] = (DEFAULT,)
    """such as `stop when reward/mean < 0.5 x early for 5 steps`; the word `default` stands for the shipped ones"""
    cooldown: int = Field(default=10, ge=1)
    """steps for which a rule that fired is silent"""

    @field_validator("rules")
    @classmethod
    def _readable(cls, rules: tuple[str, ...]) -> tuple[str, ...]:
        for text in _expand(rules):
            parse(text)
        return rules

    def parsed(self) -> list[Rule]:
        return [parse(text) for text in _expand(self.rules)] if self.mode != "off" else []


def _expand(rules: Iterable[str]) -> list[str]:
    """Every rule once, the shipped ones where `default` stands."""
    return list(dict.fromkeys(text for rule in rules for text in (DEFAULT_RULES if rule == DEFAULT else (rule,))))


@dataclass(frozen=True, slots=True)
class Firing:
    rule: Rule
    reason: str  # the metrics it looks at, as they stand


class Governor:
    """Which rules fire. One that fired is silent for `cooldown` steps, but one that skips updates goes on doing so."""

    def __init__(self, rules: Sequence[Rule], cooldown: int) -> None:
        self._rules, self._cooldown = rules, cooldown
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
        holding = [rule for rule in self._rules if self._holds(rule)]
        fresh = [rule for rule in holding if step - self._fired.get(rule.text, -self._cooldown) >= self._cooldown]
        self._fired |= {rule.text: step for rule in fresh}
        skip = any("skip_update" in rule.actions for rule in holding)
        return [Firing(rule, self._reason(rule)) for rule in fresh], skip

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


class Halted(Exception):  # noqa: N818 - not an error
    """A rule stopped the run; everything is saved. The text says which, and why."""


@dataclass(slots=True)
class Steward:
    """Hands for the governor. Judges in `approve`, as the learner asks; acts in `act`, between two steps."""

    config: GovernorConfig
    learner: Learner
    gate: Gate
    recorder: Recorder
    corrections: Sequence[str]  # stronger than the recipe's, weakest first
    precisions: Sequence[str]  # higher than the recipe's, lowest first
    halted: str | None = None  # why the run must end
    moving: bool = False  # sampling goes on in another precision: the run must end and be built anew
    _governor: Governor = field(init=False)
    _firings: list[Firing] = field(default_factory=list)
    _judged: Set[str] = frozenset()  # metrics that the last judgement had
    _late: dict[str, float] = field(default_factory=dict)  # those that came after it
    _correction: str | None = None  # what it was raised to; None: the recipe's
    _precision: str | None = None  # the same of sampling
    _max_staleness: int | None = None  # what it was lowered to; None: the recipe's

    def __post_init__(self) -> None:
        self._governor = Governor(self.config.parsed(), self.config.cooldown)

    @property
    def active(self) -> bool:
        return self.config.mode == "active"

    def approve(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Judges step `step`, measured and not yet learned from; False if its update must not be made.

        What only an update tells (its loss, its gradient norm), and what is measured after it, is judged one step late.
        """
        self._firings, skip = self._governor.judge(step, {**self._late, **metrics})
        self._late, self._judged = {}, metrics.keys()
        return not self.active or not (skip or any("stop" in firing.rule.actions for firing in self._firings))

    def note(self, metrics: Mapping[str, float]) -> None:
        """Takes what was logged since the judgement, for the next one."""
        late = self._governor.watched - self._judged
        self._late |= {name: value for name, value in metrics.items() if name in late}

    async def act(self, step: int) -> None:
        """waits for: the learner to change over, where a rule asks for it"""
        done: dict[str, str] = {}  # two rules that ask for the same change get it once
        for firing in self._firings:
            for action in firing.rule.actions:
                done[action] = done.get(action) or await self._do(action)
            what = ", ".join(done[action] for action in firing.rule.actions)
            text = f"{firing.rule.label}: {what}; {firing.reason}"
            self.recorder.event(step, GOVERNOR, text)
            if "stop" in firing.rule.actions and self.active:
                self.halted = text
        self._firings = []

    async def _do(self, action: str) -> str:
        """Does it if the governor is active. Says what was done, would be, or cannot be."""
        match action:
            case "raise_correction":
                return await self._raise_correction()
            case "lower_staleness":
                return self._lower_staleness()
            case "raise_precision":
                return self._raise_precision()
            case "skip_update":
                return "skipped the update" if self.active else "would skip the update"
            case "stop":
                return "stopped the run" if self.active else "would stop the run"
        return "warning"

    async def _raise_correction(self) -> str:
        stronger = _next(self.corrections, self._correction)
        if stronger is None:
            return "cannot raise the correction: there is no stronger one for this algorithm"
        if not self.active:
            return f"would raise the correction to {stronger}"
        await self.learner.set_correction(stronger)
        self._correction = stronger
        return f"raised the correction to {stronger}"

    def _lower_staleness(self) -> str:
        lower = self.gate.max_staleness - 1
        if lower < 0:
            return "cannot lower max_staleness: it is 0"
        if not self.active:
            return f"would lower max_staleness to {lower}"
        self.gate.lower(lower)
        self._max_staleness = lower
        return f"lowered max_staleness to {lower}"

    def _raise_precision(self) -> str:
        """Both sides must change over together, so it is left to whoever builds them."""
        higher = _next(self.precisions, self._precision)
        if higher is None:
            return "cannot raise the precision of sampling: it is the learner's own"
        if not self.active:
            return f"would raise the precision of sampling to {higher}"
        self._precision = higher
        self.moving = True
        return f"raised the precision of sampling to {higher}"

    def state(self) -> dict[str, Any]:
        """For a resumed run, which goes on with what was changed. What it was changed to is kept, not by how much: the
        recipe it goes on with may start elsewhere. The learner keeps its correction itself."""
        changed = {
            "correction": self._correction,
            "precision": self._precision,
            "max_staleness": self._max_staleness,
        }
        return {**self._governor.state(), "late": dict(self._late), **changed}

    def load(self, state: Mapping[str, Any]) -> None:
        """Brings the gate to where `state` left it; the roles were built by it. An empty one is that of a new run."""
        if not state:
            return
        self._governor.load(state)
        self._late = dict(state["late"])
        self._correction, self._precision = state["correction"], state["precision"]
        self._max_staleness = state["max_staleness"]
        if self._max_staleness is not None:
            self.gate.lower(min(self._max_staleness, self.gate.max_staleness))


def _next(rungs: Sequence[str], reached: str | None) -> str | None:
    """The rung above `reached`: the first, if it is none of them because the recipe itself stands as high."""
    above = rungs[rungs.index(reached) + 1 :] if reached in rungs else rungs
    return above[0] if above else None


def raised_precision(state: Mapping[str, Any]) -> str | None:
    """What a run whose steward has this state raised the precision of sampling to; None: it never did."""
    return state["precision"] if state else None
