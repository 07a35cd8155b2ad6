"""Minibatches of demonstrations for supervised warm-up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from lockstep.config import ConfigError
from lockstep.data.chat import render_demonstration, turn_end
from lockstep.data.order import PromptOrder
from lockstep.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class DemonstrationBatch:
    """Ragged: one list per demonstration."""

    tokens: list[list[int]]
    mask: list[list[bool]]  # True on the solution and the token that ends it


@dataclass(slots=True)
class Demonstrations:
    """Batch number `step` of an endless, seeded pass over worked samples; any step can be asked for, so a resumed
    warm-up goes on where it stopped. A demonstration longer than `max_tokens` is left out, and counted."""

    samples: Sequence[Sample]
    tokenizer: PreTrainedTokenizerBase
    batch_size: int
    seed: int
    max_tokens: int
    num_skipped: int = field(default=0, init=False)
    _order: PromptOrder = field(init=False)
    _end: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.samples:
            raise ConfigError("the task has no demonstrations: warm-up needs samples with a worked solution")
        self._order = PromptOrder(len(self.samples), self.seed)
        self._end = turn_end(self.tokenizer)

    def batch(self, step: int) -> DemonstrationBatch:
        first = step * self.batch_size
        rendered = [self._render(self.samples[self._order[i]]) for i in range(first, first + self.batch_size)]
        kept = [(tokens, mask) for tokens, mask in rendered if len(tokens) <= self.max_tokens]
        self.num_skipped += len(rendered) - len(kept)
        if not kept:
            raise ConfigError(f"every demonstration of warm-up step {step} is longer than {self.max_tokens} tokens")
        return DemonstrationBatch([tokens for tokens, _ in kept], [mask for _, mask in kept])

    def batches(self, first_step: int = 0) -> Iterator[DemonstrationBatch]:
        return (self.batch(step) for step in count(first_step))

    def _render(self, sample: Sample) -> tuple[list[int], list[bool]]:
        if sample.solution is None:
            raise ConfigError(f"demonstration {sample.uid} has no solution")
        return render_demonstration(self.tokenizer, sample.messages, sample.solution, self._end)
