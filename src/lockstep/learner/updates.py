"""One optimiser update from any number of micro-batches: gradients are summed as they come and divided once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.algorithms.diagnostics import Tally, tally_clipping
from lockstep.algorithms.objective import Objective, Part
from lockstep.data.packing import Row, collate
from lockstep.learner.config import LearnerConfig
from lockstep.learner.optimisers import build_optimiser, set_learning_rate
from lockstep.learner.parallel import prepare
from lockstep.learner.precision import MasterWeights, Skip
from lockstep.learner.ranks import Ranks
from lockstep.learner.reference import Reference
from lockstep.learner.scoring import Scores, score
from lockstep.learner.update_scale import UpdateScale, in_words
from lockstep.models.lowbit import LowBitWeights
from lockstep.models.routing import Routers
from lockstep.types import Batch


@dataclass(frozen=True, slots=True)
class Applied:
    """What one update did."""

    loss: float
    value_loss: float
    grad_norm: float
    learning_rate: float
    skipped: Skip | None


class Updater:
    """Owns the module, its master weights and the optimiser; knows no algorithm."""

    def __init__(
        self,
        module: PreTrainedModel,
        config: LearnerConfig,
        num_updates: int,
        ranks: Ranks,
        update_scale: UpdateScale | None = None,
        low_bit: LowBitWeights | None = None,
        routers: Routers | None = None,
    ) -> None:
        """`num_updates` of the whole run shape the schedule. `low_bit` is made anew whenever the masters change.

        `routers`, which the module must obey, are told the experts that a batch brings along.
        """
        self.module, self.config, self.num_updates, self.ranks = module, config, num_updates, ranks
        self.low_bit, self.routers = low_bit, routers
        self.learning_rate = config.learning_rate  # at the top of the schedule; may be set between updates
        self.dtype = config.torch_dtype(ranks.device)
        prepare(module, self.dtype, config.activation_checkpointing, ranks)
        self.masters = MasterWeights(module, self.dtype)
        self.update_scale = update_scale or UpdateScale()
        self.update_scale.begin(self.masters)
        self._encoded = False  # low-bit weights are those of the masters
        self.encode()
        self.build_optimiser()
        self.update = 0
        self.first_load: Tensor | None = None  # [layers, experts], tokens of the run's first step, for its drift
        self.reference: Reference | None = None  # the model a KL term holds this one to
        self._sums = torch.zeros(3, dtype=torch.float64, device=ranks.device)  # loss, value loss, count

    def build_optimiser(self) -> None:
        config, named = self.config, self.masters.named_parameters()
        self.optimiser = build_optimiser(
            config.optimiser, named, config.learning_rate, config.weight_decay, self.update_scale.rates
        )

    @property
    def round_tokens(self) -> int:
        """Tokens that fill a micro-batch on every rank."""
        return self.config.micro_tokens * self.ranks.world

    def shares(self, rows: Sequence[Row]) -> list[list[Row]]:
        """This rank's micro-batches."""
        return self.ranks.share(rows, self.config.micro_tokens) if rows else []

    @torch.no_grad()
    def score(self, rows: Sequence[Row]) -> tuple[Batch, Scores]:
        """The batch with the log-probs of now as its proximal ones."""
        batch = self._batch(rows)
        scores = score(self.module, batch, self.routers)
        return replace(batch, logp_prox=scores.logp), scores

    def _batch(self, rows: Sequence[Row]) -> Batch:
        """On the device and, where there is a reference, with its log-probs."""
        batch = collate(rows).to(self.ranks.device)
        if self.reference is None or batch.logp_ref is not None:
            return batch
        return replace(batch, logp_ref=self.reference.logp(batch))

    def backward(self, rows: Sequence[Row], objective: Objective, tally: Tally | None) -> tuple[Batch, Scores, Part]:
        """Adds one micro-batch to the gradient. Rows not scored before get this forward's log-probs as proximal ones.

        The objective is differentiated on its own first: where its surrogate has no gradient a token was clipped, which
        `tally` counts if there is one.
        """
        batch = self._batch(rows)
        scores = score(self.module, batch, self.routers)
        if rows[0].logp_prox is None:
            batch = replace(batch, logp_prox=scores.logp.detach())
        outputs = [scores.logp] if scores.value is None or not objective.value_coef else [scores.logp, scores.value]
        leaves = [x.detach().requires_grad_() for x in outputs]
        part = objective(leaves[0], leaves[1] if len(leaves) > 1 else None, batch)
        gradients = torch.autograd.grad(objective.total(part), leaves, retain_graph=objective.kl is not None)
        torch.autograd.backward(outputs, [self.masters.scale(g) for g in gradients])
        self._sums += torch.stack([part.loss, part.value_loss, part.count]).detach()
        if tally is not None:
            live = batch.mask & (part.weight != 0) & (batch.advantage != 0)
            ratio = objective.surrogate.companions.ratio(leaves[0].detach(), batch)
            pushed = gradients[0] if objective.kl is None else torch.autograd.grad(part.surrogate, leaves[0])[0]
            tally_clipping(tally, batch, scores.places, ratio, pushed, live)
        return batch, scores, part

    def apply(self, learning_rate: float | None = None) -> Applied:
        """Divides by the update's count over all micro-batches and ranks, clips, steps.

        A learning rate given here takes the schedule's place and does not advance it.
        """
        loss, value_loss, count = self.ranks.sum(self._sums).tolist()
        self._sums.zero_()
        rate = self._scheduled_rate if learning_rate is None else learning_rate
        self.update += learning_rate is None
        set_learning_rate(self.optimiser, rate)
        # FSDP2 averages gradients over ranks where the objective sums them.
        outcome = self.masters.step(
            self.optimiser, max_norm=self.config.clip_norm, denominator=count / self.ranks.world
        )
        if outcome.skipped is None and self.low_bit is not None:
            self._encoded = False
            if self.low_bit.in_forward:
                self.encode()
        count = count or 1.0
        return Applied(loss / count, value_loss / count, outcome.grad_norm, rate, outcome.skipped)

    def skip(self) -> Applied:
        """In place of `apply`: the gradient is forgotten; weights, optimiser and schedule stay where they are."""
        self.discard()
        return Applied(0.0, 0.0, 0.0, self._scheduled_rate, Skip.REFUSED)

    def encode(self) -> None:
        """Makes the low-bit weights, if there are any and the masters have changed; every rank must call it."""
        if self.low_bit is not None and not self._encoded:
            self.low_bit.refresh(dict(self.masters.named_parameters()))
            self._encoded = True

    @property
    def _scheduled_rate(self) -> float:
        """Of the next update."""
        return self.learning_rate * self.config.schedule.factor(self.update, self.num_updates)

    def discard(self) -> None:
        """Forgets gradients of an update that was begun and never applied."""
        self._sums.zero_()
        self.masters.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {
            "masters": self.masters.state_dict(),
            "optimiser": {"name": self.config.optimiser.name, "state": self.optimiser.state_dict()["state"]},
            "update": self.update,
            "update_scale": self.update_scale.state,
            "sampled_in": self.low_bit.precision.model_dump() if self.low_bit is not None else None,
            "first_load": self.first_load,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What was learned, not how: decay, betas and the like stay as the recipe has them now."""
        self.masters.load_state_dict(state["masters"])
        self._encoded = False
        self.encode()
        self.optimiser.load_state_dict(self.optimiser.state_dict() | {"state": state["optimiser"]["state"]})
        self.update, self.first_load = state["update"], state["first_load"]

    def misfits(self, state: dict[str, Any]) -> list[str]:
        """What keeps `state` from being loaded, in words; empty if it fits."""
        pairs = {
            "optimiser": (state["optimiser"]["name"], self.config.optimiser.name),
            "update scale": (in_words(state["update_scale"]), in_words(self.update_scale.state)),
        }
        other = [
            f"its {what} is {saved}, the recipe's is {ours}" for what, (saved, ours) in pairs.items() if saved != ours
        ]
        return other + self.masters.misfits(state["masters"]["weights"])
