"""The language of the governor's rules.

A rule is one sentence, read and checked when the recipe is loaded:

    raise_correction, lower_staleness when mismatch/lag0/f2 > 0.01 for 3 steps
    stop when reward/mean < 0.5 x early and (policy/entropy rising or rollout/truncated > 0.5)
    drift: warn when 2 of (mismatch/k3 rising over 20 steps, mismatch/ess falling, mismatch/f2 > 4 x early)

    rule      = [name ":"] action {"," action} "when" condition ["for" N "steps"]
    condition = all {"or" all}             all = test {"and" test}
    test      = metric comparison | "(" condition ")" | N "of" "(" condition {"," condition} ")"
    comparison = ((">" | ">=" | "<" | "<=") number ["x" "early"] | "rising" | "falling") ["over" N "steps"]

What is compared is the metric's value in this step or, over N steps, the mean of its last N values. `early` is the
median of its first 8 values in the run; `2 x early` is as far above that as it is from 0, also where it is negative.
A metric is rising over its last N values (10 unless said) if among all pairs of them at least three in four go up,
which noise alone does in one window of 10 out of 43, of 6 out of 15.

Nothing is concluded from a value twice: a test of a metric that this step has not logged is open, and so is a condition
that depends on it. An open condition does not hold, and the steps for which it must hold in a row pass over it. A test
of a metric that has too few values yet does not hold.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from lockstep.config import ConfigError
from lockstep.config.plugins import unknown
from lockstep.controller.signals import Signals
from lockstep.metrics import describe, known

ACTIONS = {
    "warn": "tell, and do nothing else",
    "raise_correction": "the next stronger correction of the ladder, from the next step on",
    "lower_staleness": "sampling may run one version less ahead",
    "raise_precision": "sampling moves to the next higher precision",
    "lower_rate": "the learning rate is divided by 4, from the next step on",
    "skip_update": "this step's batch moves no weight",
    "stop": "the run ends before this step's update, with a checkpoint and the reason",
}
WINDOW = 10  # values a trend is looked for in, unless the rule says
TREND = 0.5  # Kendall's tau that counts as a trend: three pairs in four go one way
LONGEST = 1000  # steps a rule may look back
LONGEST_TEXT = 1000  # characters of a rule
DEEPEST = 16  # brackets within brackets
COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


class Condition(Protocol):
    def holds(self, signals: Signals) -> bool | None:
        """None: open, for want of values in this step."""
        ...

    def tell(self, signals: Signals) -> Iterable[str]:
        """What it looks at, as it stands."""
        ...

    def windows(self) -> Mapping[str, int]:
        """The metrics it looks at, and how many of the last values it needs."""
        ...


@dataclass(frozen=True, slots=True)
class Comparison:
    metric: str
    sign: str  # a key of COMPARE
    bound: float
    relative: bool  # the bound is a multiple of the early value
    window: int = 1  # values whose mean is compared

    def holds(self, signals: Signals) -> bool | None:
        if self.metric not in signals.fresh:
            return None
        mean, bound = signals.mean(self.metric, self.window), self._bound(signals)
        return mean is not None and bound is not None and COMPARE[self.sign](mean, bound)

    def _bound(self, signals: Signals) -> float | None:
        if not self.relative:
            return self.bound
        early = signals.early(self.metric)
        return None if early is None else early + (self.bound - 1) * abs(early)

    def tell(self, signals: Signals) -> Iterable[str]:
        return [signals.tell(self.metric, self.window)]

    def windows(self) -> Mapping[str, int]:
        return {self.metric: self.window}


@dataclass(frozen=True, slots=True)
class Trend:
    metric: str
    rising: bool
    window: int

    def holds(self, signals: Signals) -> bool | None:
        if self.metric not in signals.fresh:
            return None
        trend = signals.trend(self.metric, self.window)
        return trend >= TREND if self.rising else trend <= -TREND

    def tell(self, signals: Signals) -> Iterable[str]:
        return [signals.tell(self.metric)]

    def windows(self) -> Mapping[str, int]:
        return {self.metric: self.window}


@dataclass(frozen=True, slots=True)
class Among:
    """At least `needed` of the parts hold: 1 is `or`, all of them is `and`."""

    needed: int
    parts: tuple[Condition, ...]

    def holds(self, signals: Signals) -> bool | None:
        found = [part.holds(signals) for part in self.parts]
        if found.count(True) >= self.needed:
            return True
        return None if found.count(True) + found.count(None) >= self.needed else False

    def tell(self, signals: Signals) -> Iterable[str]:
        return dict.fromkeys(text for part in self.parts for text in part.tell(signals))

    def windows(self) -> Mapping[str, int]:
        return widest(part.windows() for part in self.parts)


def widest(windows: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in windows:
        found |= {name: max(window, found.get(name, 0)) for name, window in each.items()}
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    text: str  # as written: what events and a resumed run know it by
    name: str  # "" if it has none
    actions: tuple[str, ...]  # keys of ACTIONS
    condition: Condition
    steps: int = 1  # in a row that the condition must hold, of those in which it is not open

    @property
    def label(self) -> str:
        """How an event calls it."""
        return self.name or self.text.partition(" when ")[2]


def parse(text: str) -> Rule:
    """Reads a rule; ConfigError that quotes it and says what was expected where."""
    try:
        return _Reader(text).rule()
    except ConfigError as error:
        raise ConfigError(f"rule {text!r}: {error}") from None


TOKEN = re.compile(
    r"\s*(?:"
    r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"  # a number
    r"|[A-Za-z_][\w./+-]*"  # a word: a metric's name may hold all of these
    r"|[<>]=?|[(),:])"
)
END = "the end"
T = TypeVar("T")


class _Reader:
    """Recursive descent over the words of one rule."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._words = _split(text)
        self._place = 0
        self._depth = 0

    def rule(self) -> Rule:
        name = self._take_name()
        actions = tuple(self._list(",", self._action))
        self._expect("when")
        condition = self._condition()
        steps = self._steps() if self._accept("for") else 1
        self._expect(END)
        return Rule(text=self._text, name=name, actions=actions, condition=condition, steps=steps)

    def _take_name(self) -> str:
        if self._words[1:2] != [":"]:
            return ""
        name = self._take()
        self._expect(":")
        return name

    def _action(self) -> str:
        action = self._take()
        if action not in ACTIONS:
            raise ConfigError(unknown("action", action, list(ACTIONS)))
        return action

    def _condition(self) -> Condition:
        return _among(1, self._list("or", self._all))

    def _all(self) -> Condition:
        tests = self._list("and", self._test)
        return _among(len(tests), tests)

    def _list(self, separator: str, read: Callable[[], T]) -> list[T]:
        found = [read()]
        while self._accept(separator):
            found.append(read())
        return found

    def _test(self) -> Condition:
        if self._accept("("):
            return self._enclosed(self._condition)
        return self._counted() if self._peek().isdecimal() else self._metric_test()

    def _counted(self) -> Condition:
        needed = int(self._take())
        self._expect("of")
        self._expect("(")
        parts = self._enclosed(lambda: self._list(",", self._condition))
        if not 1 <= needed <= len(parts):
            raise ConfigError(f"{needed} of {len(parts)} conditions makes no sense; use 1 to {len(parts)}")
        return Among(needed, tuple(parts))

    def _enclosed(self, read: Callable[[], T]) -> T:
        """What stands between brackets, the first of which has been read."""
        self._depth += 1
        if self._depth > DEEPEST:
            raise ConfigError(f"more than {DEEPEST} brackets within brackets")
        found = read()
        self._expect(")")
        self._depth -= 1
        return found

    def _metric_test(self) -> Condition:
        metric = self._take()
        if describe(metric) is None:
            raise ConfigError(unknown_metric(metric))
        test = self._take()
        if test in ("rising", "falling"):
            window = self._steps() if self._accept("over") else WINDOW
            if window < 4:
                raise ConfigError(f"a trend over {window} steps: at least 4 are needed to tell one from noise")
            return Trend(metric, test == "rising", window)
        if test not in COMPARE:
            raise ConfigError(f"after {metric!r} expected {', '.join(COMPARE)}, rising or falling, found {test!r}")
        return self._comparison(metric, test)

    def _comparison(self, metric: str, sign: str) -> Condition:
        bound = self._number()
        relative = self._accept("x")
        if relative:
            self._expect("early")
            if bound < 0:
                raise ConfigError(f"{bound:g} x early: a multiple cannot be negative")
        window = self._steps() if self._accept("over") else 1
        return Comparison(metric, sign, bound, relative, window)

    def _number(self) -> float:
        word = self._take()
        try:
            value = float(word)
        except ValueError:
            raise ConfigError(f"expected a number, found {word!r}") from None
        if not math.isfinite(value):
            raise ConfigError(f"expected a finite number, found {word!r}")
        return value

    def _steps(self) -> int:
        word = self._take()
        if not word.isdecimal() or not 1 <= float(word) <= LONGEST:
            raise ConfigError(f"expected a number of steps from 1 to {LONGEST}, found {word!r}")
        if not self._accept("step"):
            self._expect("steps")
        return int(word)

    def _peek(self) -> str:
        return self._words[self._place] if self._place < len(self._words) else END

    def _take(self) -> str:
        word = self._peek()
        self._place += 1
        return word

    def _accept(self, wanted: str) -> bool:
        found = self._peek() == wanted
        self._place += found
        return found

    def _expect(self, wanted: str) -> None:
        word = self._take()
        if word != wanted:
            raise ConfigError(f"expected {wanted!r}, found {word!r}")


def _split(text: str) -> list[str]:
    if len(text) > LONGEST_TEXT:
        raise ConfigError(f"longer than {LONGEST_TEXT} characters")
    words: list[str] = []
    place = 0
    while rest := text[place:].strip():
        match = TOKEN.match(text, place)
        if match is None:
            raise ConfigError(f"cannot read {rest[:20]!r}")
        words.append(match[0].strip())
        place = match.end()
    return words


def _among(needed: int, parts: Sequence[Condition]) -> Condition:
    return parts[0] if len(parts) == 1 else Among(needed, tuple(parts))


def unknown_metric(name: str) -> str:
    """The nearest documented name; where none is near, the families there are."""
    names = [known_name for known_name in known() if "*" not in known_name]
    families = sorted({f"{known_name.split('/')[0]}/…" for known_name in names})
    near = difflib.get_close_matches(name, names, n=1)
    return f"unknown metric {name!r}: " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(families)}")
