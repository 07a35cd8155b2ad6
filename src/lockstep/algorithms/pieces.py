"""The pieces of objective = reduce(correction · surrogate), each a frozen dataclass in a file of its own.

Symbols: ℓ `logp` carries the gradient, ℓp `logp_prox` and ℓb `logp_behav` are frozen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from lockstep.types import Batch


class Surrogate(Protocol):
    """Loss per token, minimised. Never masks, averages, corrects or logs. Its usual companions are named with it."""

    advantage: ClassVar[str]
    reduction: ClassVar[str]
    dynamic_sampling: ClassVar[bool]

    def __call__(self, logp: Tensor, batch: Batch) -> Tensor:
        """ℓ [N] and the batch, to loss [N]."""
        ...


class Correction(Protocol):
    """What multiplies a token's loss because the sampler was not the learner: detached, exactly 0 if rejected."""

    @property
    def cap(self) -> float:
        """The weight from which on a token counts as truncated; inf if nothing is."""
        ...

    def __call__(self, batch: Batch) -> Tensor:
        """Weight [N] from ℓp and ℓb."""
        ...


class Reduction(Protocol):
    """How tokens become one number: loss = Σ weight·loss / Σ count, both sums over the whole optimiser update.

    Counts of micro-batches and ranks add up, so any split of an update gives the same loss and gradient.
    """

    @property
    def count_rejected(self) -> bool:
        """Whether what a correction rejected stays in the denominator."""
        ...

    def __call__(self, batch: Batch, counted: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [N], zero outside `counted` [N], and this batch's part of the denominator, a scalar."""
        ...


@dataclass(frozen=True, slots=True)
class Episodes:
    """Judged answers end to end, sampled tokens only: what an advantage is computed from."""

    rewards: Tensor  # [G] float64
    seq: Tensor  # [M] int64, which answer a sampled token belongs to, ascending
    values: Tensor | None = None  # [M] float32, the value head's prediction before the token


class Advantage(Protocol):
    """Advantage per sampled token [M], of one complete group or, with scope "batch", of all groups of a step.

    One with scope "batch" or with values cannot be streamed: it waits for the step to be complete or scored.
    """

    scope: ClassVar[str]  # "group" | "batch"
    needs_values: ClassVar[bool]

    def __call__(self, episodes: Episodes) -> Tensor: ...
