"""The governor's hands: does what its rules ask for or, in advisory mode, says what it would have done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lockstep.controller.gate import Gate
from lockstep.controller.governor import Firing, Governor, GovernorConfig
from lockstep.protocols import GOVERNOR, Learner, Recorder

RATE_DIVISOR = 4  # what `lower_rate` divides the learning rate by
LEAST_RATE = 1 / 64  # of the full one: below it a run hardly learns, and its trouble is another


class Halted(Exception):  # noqa: N818 - not an error
    """A rule stopped the run; everything is saved. The text says which, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What settings the governor has reached, not by how much: the recipe a run goes on with may start elsewhere.

    None: that of the recipe.
    """

    correction: str | None = None
    precision: str | None = None  # of sampling
    max_staleness: int | None = None
    learning_rate: float | None = None
    full_rate: float | None = None  # the one that was lowered first: what the least one is a share of

    @staticmethod
    def of(state: Mapping[str, Any]) -> Changes:
        """Those of a steward with this state; an empty one is that of a new run."""
        return Changes(**state["changes"]) if state else Changes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How far the recipe lets the governor go."""

    corrections: Sequence[str] = ()  # stronger than the recipe's, weakest first
    precisions: Sequence[str] = ()  # higher than the recipe's, lowest first
    learning_rate: float  # the recipe's


@dataclass(slots=True)
class Steward:
    """Judges in `approve`, as the learner asks; acts in `act`, between two steps. Each firing is an event."""

    config: GovernorConfig
    learner: Learner
    gate: Gate
    recorder: Recorder
    reach: Reach
    halted: str | None = None  # why the run must end
    moving: bool = False  # sampling goes on in another precision: the run must end and be built anew
    changes: Changes = field(default_factory=Changes)
    _governor: Governor = field(init=False)
    _firings: list[Firing] = field(default_factory=list)
    _judged: Set[str] = frozenset()  # metrics that the last judgement had
    _late: dict[str, float] = field(default_factory=dict)  # those that came after it

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
            case "lower_rate":
                return await self._lower_rate()
            case "skip_update":
                return "skipped the update" if self.active else "would skip the update"
            case "stop":
                return "stopped the run" if self.active else "would stop the run"
        return "warning"

    async def _raise_correction(self) -> str:
        stronger = _next(self.reach.corrections, self.changes.correction)
        if stronger is None:
            return "cannot raise the correction: there is no stronger one for this algorithm"
        if not self.active:
            return f"would raise the correction to {stronger}"
        await self.learner.set_correction(stronger)
        self.changes = replace(self.changes, correction=stronger)
        return f"raised the correction to {stronger}"

    def _lower_staleness(self) -> str:
        lower = self.gate.max_staleness - 1
        if lower < 0:
            return "cannot lower max_staleness: it is 0"
        if not self.active:
            return f"would lower max_staleness to {lower}"
        self.gate.lower(lower)
        self.changes = replace(self.changes, max_staleness=lower)
        return f"lowered max_staleness to {lower}"

    def _raise_precision(self) -> str:
        """Both sides must change over together, so it is left to whoever builds them."""
        higher = _next(self.reach.precisions, self.changes.precision)
        if higher is None:
            return "cannot raise the precision of sampling: it is the learner's own"
        if not self.active:
            return f"would raise the precision of sampling to {higher}"
        self.changes = replace(self.changes, precision=higher)
        self.moving = True
        return f"raised the precision of sampling to {higher}"

    async def _lower_rate(self) -> str:
        now = self.reach.learning_rate
        if self.changes.learning_rate is not None:
            now = min(now, self.changes.learning_rate)
        full = self.changes.full_rate or self.reach.learning_rate
        lower = now / RATE_DIVISOR
        if lower < LEAST_RATE * full:
            return f"cannot lower the learning rate: {now:g} is already {now / full:.2g} of {full:g}"
        if not self.active:
            return f"would lower the learning rate to {lower:g}"
        await self.learner.set_learning_rate(lower)
        self.changes = replace(self.changes, learning_rate=lower, full_rate=full)
        return f"lowered the learning rate to {lower:g}"

    def state(self) -> dict[str, Any]:
        """For a resumed run, which goes on with what was changed."""
        return {**self._governor.state(), "late": dict(self._late), "changes": asdict(self.changes)}

    def load(self, state: Mapping[str, Any], step: int) -> None:
        """Brings the gate to where `state` left it after `step` steps; the roles were built by it. An empty state is
        that of a new run."""
        if not state:
            return
        self._governor.load(state)
        self._late, self.changes = dict(state["late"]), Changes.of(state)
        if self.changes.max_staleness is not None:
            self.gate.lower(min(self.changes.max_staleness, self.gate.max_staleness))
        self._tell_silent(step)

    def _tell_silent(self, step: int) -> None:
        """A run that goes on after a rule stopped it would otherwise seem to have been cured."""
        for rule in self._governor.rules:
            until = self._governor.speaks_again(rule)
            if "stop" in rule.actions and self.active and until > step + 1:
                text = f"the rule that stopped the run is silent until step {until}: {rule.label}"
                self.recorder.event(step, "cooldown", text)


def _next(rungs: Sequence[str], reached: str | None) -> str | None:
    """The rung above `reached`: the first, if it is none of them because the recipe itself stands as high."""
    above = rungs[rungs.index(reached) + 1 :] if reached in rungs else rungs
    return above[0] if above else None
