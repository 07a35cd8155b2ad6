"""objective = reduce(correction · surrogate): the one place where the pieces meet."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.algorithms.pieces import Correction, Reduction, Surrogate
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Gives a batch's part of an update's loss: a sum and what it adds to the denominator."""

    surrogate: Surrogate
    correction: Correction
    reduction: Reduction
    value_coef: float = 0.0

    def __call__(self, logp: Tensor, value: Tensor | None, batch: Batch) -> Part:
        if self.surrogate.companions.prox_now:  # for the correction too: w is of the same ℓp
            batch = replace(batch, logp_prox=logp.detach())
        weight = self.correction(batch)
        accepted = batch.mask & (weight != 0)
        share, count = self.reduction(batch, batch.mask if self.reduction.count_rejected else accepted)
        loss = share * torch.where(accepted, weight * self.surrogate(logp, batch), 0.0)
        squared = torch.zeros_like(loss) if value is None else share * value_error(value, batch)
        return Part(loss.sum(), squared.sum(), count, weight)

    def total(self, part: Part) -> Tensor:
        """What backward is called on; still to be divided by the update's count."""
        return part.loss + self.value_coef * part.value_loss


@dataclass(frozen=True, slots=True)
class Part:
    """One micro-batch's sums, not yet divided."""

    loss: Tensor
    value_loss: Tensor
    count: Tensor  # what it adds to the denominator
    weight: Tensor  # [N] of the correction


def value_error(value: Tensor, batch: Batch) -> Tensor:
    """½(V − G)² per token, G the return the advantage implies."""
    assert batch.returns is not None
    return 0.5 * (value - batch.returns) ** 2
