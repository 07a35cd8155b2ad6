"""The model a KL term holds the policy to: frozen, never low-bit, with its own routing."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.learner.parallel import prepare
from lockstep.learner.ranks import Ranks
from lockstep.learner.scoring import score
from lockstep.models import loading
from lockstep.models.head import install_head
from lockstep.models.learner_view import use_learner_view
from lockstep.models.loading import ModelConfig
from lockstep.models.selfcheck import self_check
from lockstep.types import Batch


class Reference:
    """A checkpoint that only scores. It computes as a learner in high precision does, so that equal weights then give
    equal log-probs.

    Over several ranks it is sharded like the learner: every rank must make the same calls.
    """

    def __init__(self, path: str, dtype: torch.dtype, ranks: Ranks, *, float32_logits: bool) -> None:
        config = ModelConfig(path=path, float32_logits=float32_logits)
        self.module = loading.load(config, dtype=dtype, device=ranks.device, seed=0).module
        self_check(self.module)
        use_learner_view(self.module)
        install_head(self.module, with_value=False)
        self.module.requires_grad_(False)
        prepare(self.module, dtype, False, ranks)

    @torch.no_grad()
    def logp(self, batch: Batch) -> Tensor:
        """[N], zero where not sampled, at the sampling temperature."""
        return score(self.module, batch).logp
