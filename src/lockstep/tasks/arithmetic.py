"""Sums that are made up as they are needed: `7+5-9=` is worked out as `7+5=12;12-9=3;#3`.

What makes it useful for a first run: one knob (the number of terms) goes from trivial to hard, a worked solution
exists for every problem, and whoever can do one step and copy can, in principle, do any length.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import ClassVar, Literal

from lockstep.config import ConfigError
from lockstep.tasks._lazy import LazySamples, draw
from lockstep.tasks.judging import Part, combine
from lockstep.types import Message, Sample, Verdict

MARKER = "#"  # what follows the last one is the final answer
_WELL_FORMED = re.compile(r"([^#;\n]+;)*#-?\d+")


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    fast: ClassVar[bool] = True

    min_terms: int = 2
    """Fewest numbers in a problem, in training and evaluation."""
    max_terms: int = 5
    """Most numbers in a problem: the difficulty."""
    max_value: int = 9
    """Largest number in a problem; the smallest is 0."""
    operations: str = "+"
    """Which of + and - appear."""
    modulus: int | None = None
    """Calculate modulo this, so that every intermediate result stays small; none by default."""
    demo_min_terms: int = 2
    """Fewest numbers in a demonstration."""
    demo_max_terms: int = 3
    """Most numbers in a demonstration: below max_terms, what lies beyond must be found by RL."""
    demo_max_value: int | None = None
    """Largest number in a demonstration; max_value by default."""
    steps: Literal["full", "totals", "none"] = "full"
    """What a demonstration shows before the answer: `7+5=12;12+9=21;`, `12;21;` or nothing."""
    format_weight: float = 0.0
    """Reward added for steps and one final answer in the form of the demonstrations, right or wrong."""
    num_train: int = 100_000
    """Training problems; they are made as needed, so this costs nothing."""
    num_eval: int = 256
    """Held-out problems."""
    num_demos: int = 20_000
    """Demonstrations for warm-up."""
    seed: int = 0
    """Which problems are drawn. The splits are disjoint even across seeds."""

    def __post_init__(self) -> None:
        for kind in ("", "demo_"):
            fewest, most = getattr(self, f"{kind}min_terms"), getattr(self, f"{kind}max_terms")
            if not 1 <= fewest <= most:
                raise ConfigError(f"{kind}min_terms is {fewest}, {kind}max_terms {most}: must be 1 <= min <= max")
        if not self.operations or set(self.operations) - set("+-"):
            raise ConfigError(f"operations is {self.operations!r}; choices: '+', '-', '+-'")
        if self.modulus is not None and self.modulus < 2:
            raise ConfigError(f"modulus is {self.modulus}: must be at least 2")

    def samples(self, split: str) -> Sequence[Sample]:
        sizes = {"train": self.num_train, "eval": self.num_eval}
        if split not in sizes:
            raise ConfigError(f"unknown split {split!r}; choices: {', '.join(sizes)}")
        return LazySamples(sizes[split], lambda i: self._sample(split, i))

    def demonstrations(self) -> Sequence[Sample]:
        return LazySamples(self.num_demos, lambda i: self._sample("demonstrations", i))

    def reward(self, sample: Sample, answer: str) -> Verdict:
        correct = _judge_final(answer, sample.answer)
        return combine(correct, self._judge_format(answer)) if self.format_weight else combine(correct)

    def _judge_format(self, answer: str) -> Part:
        fits = _WELL_FORMED.fullmatch(answer.strip()) is not None
        reason = "steps, then one answer" if fits else f"not of the form 1+2=3;{MARKER}3"
        return Part("format", float(fits), reason, self.format_weight)

    def _sample(self, split: str, index: int) -> Sample:
        propose = self._propose_easy if split == "demonstrations" else self._propose
        terms = draw(self.seed, split, index, propose, "".join)
        totals = self._totals(terms)
        return Sample(
            uid=f"{split}/{index}",
            messages=(Message("user", f"{''.join(terms)}="),),
            answer=totals[-1],
            solution=f"{self._work(terms, totals)}{MARKER}{totals[-1]}",
            info={"terms": len(terms)},
        )

    def _propose(self, random: Random) -> list[str]:
        return self._terms(random, random.randint(self.min_terms, self.max_terms), self.max_value)

    def _propose_easy(self, random: Random) -> list[str]:
        largest = self.max_value if self.demo_max_value is None else self.demo_max_value
        return self._terms(random, random.randint(self.demo_min_terms, self.demo_max_terms), largest)

    def _terms(self, random: Random, num_terms: int, largest: int) -> list[str]:
        """["7", "+5", "-9"]"""
        signs = ["", *random.choices(self.operations, k=num_terms - 1)]
        return [f"{sign}{random.randint(0, largest)}" for sign in signs]

    def _totals(self, terms: Sequence[str]) -> list[str]:
        """The results after one term, two terms, …: ["7", "12", "3"]"""
        totals = accumulate(map(int, terms))
        return [str(total if self.modulus is None else total % self.modulus) for total in totals]

    def _work(self, terms: Sequence[str], totals: Sequence[str]) -> str:
        if self.steps == "none":
            return ""
        if self.steps == "totals":
            return "".join(f"{total};" for total in totals[1:])
        before = [terms[0], *totals[1:]]
        return "".join(f"{b}{term}={total};" for b, term, total in zip(before, terms[1:], totals[1:], strict=False))


def _judge_final(answer: str, expected: str) -> Part:
    _, marker, final = answer.rpartition(MARKER)
    final = final.strip()
    if not marker:
        return Part("correct", 0.0, f"no {MARKER} before a final answer")
    if final == expected:
        return Part("correct", 1.0, f"{final} is {expected}")
    return Part("correct", 0.0, f"{final[:40] or 'nothing'} is not {expected}")
