"""The pieces of objective = reduce(correction · surrogate), each a frozen dataclass in a file of its own.

Symbols: ℓ `logp` carries the gradient, ℓp `logp_prox` and ℓb `logp_behav` are frozen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from lockstep.algorithms.ratios import prox_ratio
from lockstep.types import Batch

Ratio: TypeAlias = Callable[[Tensor, Batch], Tensor]
"""Of ℓ [N] and the batch: how far the policy has moved, 1 where it has not; see `ratios`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Companions:
    """What a surrogate is used with. The first four are its paper's choices, and a recipe may make others.

    The rest is what the equation insists on, so that a recipe that says otherwise is refused.
    """

    advantage: str
    reduction: str
    correction: str = "tis"
    dynamic_sampling: bool = False  # replaces groups whose rewards are all equal
    holds_weight: bool = False  # divides by the sampler's probability itself: a second weight is refused
    shares: str | None = None  # an option that its correction, and no other, must set to the same value
    prox_now: bool = False  # ℓp := sg(ℓ) at every update, instead of what was frozen before the step's first
    one_update: bool = False  # per step
    ratio: Ratio = prox_ratio  # what it clips: clipped tokens are counted by the side of 1 it is on


class Surrogate(Protocol):
    """Loss per token, minimised. Never masks, averages, corrects or logs."""

    companions: ClassVar[Companions]

    def __call__(self, logp: Tensor, batch: Batch) -> Tensor:
        """ℓ [N] and the batch, to loss [N]."""
        ...


class Correction(Protocol):
    """What multiplies a token's loss because the sampler was not the learner: detached, exactly 0 if rejected."""

    @property
    def bounds(self) -> tuple[float, float]:
        """What it cuts smaller and larger weights to: a token at a bound counts as truncated; (0, inf) if none is."""
        ...

    def __call__(self, batch: Batch) -> Tensor:
        """Weight [N] from ℓp and ℓb."""
        ...


class NamedCorrection(Correction, Protocol):
    """One that a recipe may name, alone or in a list."""

    weighs: ClassVar[bool]  # it estimates π_prox/π_behav, which is done once at most; one that does not only rejects


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

    @property
    def all_equal(self) -> bool:
        """No answer is better than another: an advantage is then exactly 0, which R − mean need not be when rounded."""
        return bool(self.rewards.min() == self.rewards.max())

    def normalised(self, eps: float) -> Tensor:
        """(R − mean) / (std + eps) [G], unbiased std; exactly 0 if all are equal, as one alone is."""
        R = self.rewards
        return torch.zeros_like(R) if self.all_equal else (R - R.mean()) / (R.std(correction=1) + eps)

    def per_token(self, A: Tensor) -> Tensor:
        """A [G], one for each answer, on its tokens [M]."""
        return A.float()[self.seq]


class Advantage(Protocol):
    """Advantage per sampled token [M], of one complete group or, with scope "batch", of all groups of a step.

    One with scope "batch" or with values cannot be streamed: it waits for the step to be complete or scored.
    """

    scope: ClassVar[str]  # "group" | "batch"
    needs_values: ClassVar[bool]

    def __call__(self, episodes: Episodes) -> Tensor: ...
