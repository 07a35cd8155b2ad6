"""A task any model improves on at once: answer in printable ASCII. Test recipes name it `printable.py:Printable`."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import ClassVar

from lockstep.types import Message, Sample, Verdict


@dataclass(frozen=True, kw_only=True)
class Printable:
    fast: ClassVar[bool] = True
    num_train: int = 64
    fail_on: str = ""  # raise when the prompt holds this
    slow: float = 0.0  # seconds a reward takes

    def samples(self, split: str) -> list[Sample]:
        return [
            Sample(uid=f"{split}/{i}", messages=(Message("user", f"{split[0]}{i}"),), answer=str(i), solution=str(i))
            for i in range(self.num_train if split == "train" else 8)
        ]

    def demonstrations(self) -> list[Sample]:
        return self.samples("train")

    def reward(self, sample: Sample, answer: str) -> Verdict:
        if self.fail_on and self.fail_on in sample.messages[0].content:
            raise RuntimeError("asked to fail")
        time.sleep(self.slow)
        if os.environ.get("PRINTABLE_NAN"):
            return Verdict(value=float("nan"))
        share = sum(c.isascii() and c.isprintable() for c in answer) / max(len(answer), 1)
        return Verdict(value=share, parts={"correct": share}, reasons=(f"{share:.0%} printable",))
