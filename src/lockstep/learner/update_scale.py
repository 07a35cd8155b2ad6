"""`learner.update_scale`: the scaled weights a learner trains, or the learning rates that amount to the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.learner.config import LearnerConfig
from lockstep.learner.parallel import whole
from lockstep.learner.precision import MasterWeights
from lockstep.models.scaling import Scaling, find_scaling

NOTHING = Scaling((), {})


def in_words(state: Mapping[str, Any]) -> str:
    return f"{state['factor']:g} by {state['by']}" if state["factor"] != 1 else "off"


@dataclass(frozen=True, slots=True)
class UpdateScale:
    """Everything that is kept elsewhere or leaves the run is un-scaled; only masters and what is published are not."""

    factor: float = 1.0
    by: Literal["weights", "rates"] = "weights"
    scaling: Scaling = NOTHING

    @classmethod
    def of(cls, module: PreTrainedModel, config: LearnerConfig) -> UpdateScale:
        """For a module as it was loaded: the self-check of the folds calls plain transformers."""
        if config.update_scale == 1:
            return cls()
        return cls(config.update_scale, config.update_scale_by, find_scaling(module))

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint says of the weights in it."""
        return {"factor": self.factor, "by": self.by}

    @property
    def rates(self) -> dict[str, float]:
        """What multiplies the learning rate of a parameter."""
        return self.scaling.rates(self.factor) if self.by == "rates" else {}

    def begin(self, masters: MasterWeights) -> None:
        """Scales the weights, in float32: a bfloat16 checkpoint that is never trained comes back bit for bit."""
        if self.by == "weights":
            self.scaling.apply(dict(masters.named_parameters()), self.factor)
            masters.publish()

    def end(self, masters: MasterWeights, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole weights for a checkpoint, without the scale. All ranks must call it."""
        if self.by == "rates":
            return dict(weights)
        scaled = {*self.scaling.matrices, *self.scaling.norms}
        return dict(weights) | {
            name: self.scaling.undo(name, whole(master.detach(), torch.float32), self.factor).to(weights[name].dtype)
            for name, master in masters.named_parameters()
            if name in scaled
        }
