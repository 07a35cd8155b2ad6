"""Sums that are made up as they are needed: `7+5-9=` is worked out as `7+5=12;12-9=3;#3`.

What makes it useful for a first run: a few knobs go from trivial to hard, every problem has a worked solution, and
demonstrations can be easier than the problems, or hide how they are worked, so that something is left for RL to find.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from random import Random
from typing import ClassVar

from lockstep.config import ConfigError
from lockstep.tasks._lazy import LazySamples, draw, hash_share
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
    min_minus: int = 0
    """Fewest subtractions in a problem; from there on, any number is as likely as any other."""
    modulus: int | None = None
    """Calculate modulo this, so that every intermediate result stays small; none by default."""
    demo_max_terms: int = 3
    """Most numbers in a demonstration; the fewest are 2."""
    demo_max_minus: int | None = None
    """Most subtractions in a demonstration; any number by default."""
    demo_steps: float = 1.0
    """Share of demonstrations that show their steps; the others give the answer straight away."""
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
        if not 1 <= self.min_terms <= self.max_terms:
            raise ConfigError(f"min_terms is {self.min_terms}, max_terms {self.max_terms}: must be 1 <= min <= max")
        if not self.operations or set(self.operations) - set("+-"):
            raise ConfigError(f"operations is {self.operations!r}; choices: '+', '-', '+-'")
        if self.modulus is not None and self.modulus < 2:
            raise ConfigError(f"modulus is {self.modulus}: must be at least 2")
        room = self.min_terms - 1 if "-" in self.operations else 0
        if not 0 <= self.min_minus <= room:
            raise ConfigError(
                f"min_minus is {self.min_minus}: must be 0 to {room}, or some problems have no room for it"
            )
        self._check_demonstrations()

    def _check_demonstrations(self) -> None:
        if self.demo_max_terms < 2:
            raise ConfigError(f"demo_max_terms is {self.demo_max_terms}: must be at least 2")
        if self.demo_max_minus is not None and (self.demo_max_minus < 0 or "+" not in self.operations):
            raise ConfigError(f"demo_max_minus is {self.demo_max_minus}: must be at least 0, with + among operations")
        if not 0 <= self.demo_steps <= 1:
            raise ConfigError(f"demo_steps is {self.demo_steps}: must be 0 to 1")

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
        shows_steps = split != "demonstrations" or hash_share(f"{self.seed}/steps/{index}") < self.demo_steps
        return Sample(
            uid=f"{split}/{index}",
            messages=(Message("user", f"{''.join(terms)}="),),
            answer=totals[-1],
            solution=f"{self._work(terms, totals) if shows_steps else ''}{MARKER}{totals[-1]}",
            info={"terms": len(terms)},
        )

    def _propose(self, random: Random) -> list[str]:
        return self._terms(random, random.randint(self.min_terms, self.max_terms), self.min_minus, None)

    def _propose_easy(self, random: Random) -> list[str]:
        return self._terms(random, random.randint(2, self.demo_max_terms), 0, self.demo_max_minus)

    def _terms(self, random: Random, num_terms: int, min_minus: int, max_minus: int | None) -> list[str]:
        """["7", "+5", "-9"]"""
        num = num_terms - 1
        least = min_minus if "+" in self.operations else num
        most = 0 if "-" not in self.operations else num if max_minus is None else min(max_minus, num)
        num_minus = random.randint(least, most)
        signs = ["-"] * num_minus + ["+"] * (num - num_minus)
        random.shuffle(signs)
        return [f"{sign}{random.randint(0, self.max_value)}" for sign in ["", *signs]]

    def _totals(self, terms: Sequence[str]) -> list[str]:
        """The results after one term, two terms, …: ["7", "12", "3"]"""
        totals = accumulate(map(int, terms))
        return [str(total if self.modulus is None else total % self.modulus) for total in totals]

    def _work(self, terms: Sequence[str], totals: Sequence[str]) -> str:
        """7+5=12;12-9=3;"""
        return "".join(
            f"{before}{term}={after};" for (before, after), term in zip(pairwise(totals), terms[1:], strict=True)
        )


def _judge_final(answer: str, expected: str) -> Part:
    _, marker, final = answer.rpartition(MARKER)
    final = final.strip()
    if not marker:
        return Part("correct", 0.0, f"no {MARKER} before a final answer")
    if final == expected:
        return Part("correct", 1.0, f"{final} is {expected}")
    return Part("correct", 0.0, f"{final[:40] or 'nothing'} is not {expected}")
