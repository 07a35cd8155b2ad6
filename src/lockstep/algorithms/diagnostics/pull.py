"""How far the learner has gone from the reference that a KL term holds it to."""

from __future__ import annotations

import torch

from lockstep.algorithms.diagnostics.tally import Tally
from lockstep.algorithms.kl.k3 import K3
from lockstep.types import Batch


@torch.no_grad()
def tally_kl(tally: Tally, batch: Batch) -> None:
    """k3 of ℓp and ℓref, whatever the estimator of the run, so that runs compare; nothing without a reference."""
    if batch.logp_ref is None:
        return
    k3 = K3()(batch.logp_prox.double(), batch.logp_ref.double())
    tally.add("kl_ref", torch.stack([batch.mask.sum().double(), torch.where(batch.mask, k3, 0.0).sum()]))
