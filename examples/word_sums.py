"""Easy sums in words, for a small chat model: five kinds of problems, and a reward for the right number at the end."""

import re
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from lockstep.tasks import Part, combine
from lockstep.types import Message, Sample

HELD_OUT = 512


@dataclass(frozen=True, kw_only=True)
class WordSums:
    fast: ClassVar[bool] = True  # judged in place
    drawn: int = 8512  # problems, many of them more than once
    seed: int = 0

    def samples(self, split):
        """All are drawn at once, so that no question is in both splits."""
        random = Random(self.seed)
        problems = list(dict(problem(random) for _ in range(self.drawn)).items())
        chosen = problems[:HELD_OUT] if split == "eval" else problems[HELD_OUT:]
        return [
            Sample(uid=f"{split}/{i}", messages=(Message("user", question),), answer=str(total))
            for i, (question, total) in enumerate(chosen)
        ]

    def demonstrations(self):
        return []

    def reward(self, sample, answer):
        numbers = re.findall(r"\d+", answer)
        final = numbers[-1] if numbers else "no number"
        return combine(Part("correct", float(final == sample.answer), f"{final}, expected {sample.answer}"))


def problem(random):
    """A question and its answer."""
    a, b = random.randint(20, 99), random.randint(20, 99)
    c, d, e = (random.randint(2, 20) for _ in range(3))
    name, things = random.choice(["Ana", "Lee", "Sara", "Tom"]), random.choice(["apples", "books", "coins"])
    return random.choice(
        [
            (f"What is {a} + {b}?", a + b),
            (f"What is {max(a, b)} - {min(a, b)}?", abs(a - b)),
            (f"What is {c} + {d} + {e}?", c + d + e),
            (f"What is {c} times {d}?", c * d),
            (
                f"{name} has {a} {things}, buys {c} more and gives {d} away. How many {things} does {name} have now?",
                a + c - d,
            ),
        ]
    )
