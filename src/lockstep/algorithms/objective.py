"""objective = reduce(correction · (surrogate + coef·kl)): the one place where the pieces meet."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.algorithms.pieces import Correction, Reduction, Surrogate
from lockstep.algorithms.reference import KL
from lockstep.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Gives a batch's part of an update's loss: a sum and what it adds to the denominator."""

    surrogate: Surrogate
    correction: Correction
    reduction: Reduction
    value_coef: float = 0.0
    kl: KL | None = None  # of the loss
    kl_coef: float = 0.0

    def __call__(self, logp: Tensor, value: Tensor | None, batch: Batch) -> Part:
        if self.surrogate.companions.prox_now:  # for the correction too: w is of the same ℓp
            batch = replace(batch, logp_prox=logp.detach())
        weight = self.correction(batch)
        accepted = batch.mask & (weight != 0)
        share, count = self.reduction(batch, batch.mask if self.reduction.count_rejected else accepted)
        surrogate = loss = share * torch.where(accepted, weight * self.surrogate(logp, batch), 0.0)
        if self.kl is not None:
            assert batch.logp_ref is not None, "a KL term needs the reference's log-probs"
            kl = self.kl_coef * self.kl(logp, batch.logp_ref)
            loss = surrogate + share * torch.where(accepted, weight * kl, 0.0)
        squared = torch.zeros_like(loss) if value is None else share * value_error(value, batch)
        return Part(loss.sum(), surrogate.sum(), squared.sum(), count, weight)

    def total(self, part: Part) -> Tensor:
        """What backward is called on; still to be divided by the update's count."""
        return part.loss + self.value_coef * part.value_loss


@dataclass(frozen=True, slots=True)
class Part:
    """One micro-batch's sums, not yet divided."""

    loss: Tensor
    surrogate: Tensor  # the loss without its KL term: it has no gradient where it clips
    value_loss: Tensor
    count: Tensor  # what it adds to the denominator
    weight: Tensor  # [N] of the correction


def value_error(value: Tensor, batch: Batch) -> Tensor:
    """½(V − G)² per token, G the return the advantage implies."""
    assert batch.returns is not None
    return 0.5 * (value - batch.returns) ** 2
