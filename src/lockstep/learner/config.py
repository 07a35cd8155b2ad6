"""How the learner learns, whatever the algorithm."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field

from lockstep.config import Config, Plugin, plugin
from lockstep.learner.schedule import Schedule

OPTIMISERS = "lockstep.learner.optimisers"


class LearnerConfig(Config):
    """A step consumes one batch of groups in `mini_steps` × `epochs` optimiser updates."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Step size at the top of the schedule."""
    optimiser: Annotated[Plugin, plugin(OPTIMISERS)] = Plugin(package=OPTIMISERS, name="adamw")
    """What turns gradients into updates."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay of matrices."""
    schedule: Schedule = Schedule()
    """The learning rate over the run."""
    clip_norm: float | None = Field(default=1.0, gt=0)
    """Largest global gradient norm."""
    mini_steps: int = Field(default=1, ge=1)
    """Optimiser updates per epoch of a step; 1 learns while groups are still arriving."""
    epochs: int = Field(default=1, ge=1)
    """How often a step goes through its batch."""
    micro_tokens: int = Field(default=16384, ge=1)
    """Tokens per forward and backward on one rank: the knob for memory."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What the model computes in; auto is bfloat16 on a GPU and float32 on a CPU. Master weights are float32 always."""
    alignment: Literal["aligned", "none"] = "aligned"
    """With a low-bit rollout.precision: the learner's forward runs the same codes and arithmetic, or stays high."""
    routing: Literal["r3", "r2", "off"] = "r3"
    """Experts of a mixture: those the sampler chose, those chosen before the step's first update, or chosen anew."""
    activation_checkpointing: bool = False
    """Compute each layer twice to hold one layer's activations instead of all."""
    update_scale: float = Field(default=1.0, ge=0.01, le=100)
    """Update-aware scaling: norms times this, the matrices that read them divided by it; checkpoints are without it."""
    update_scale_by: Literal["weights", "rates"] = "weights"
    """Scale the weights, or in their place learning rates: of those matrices times the scale, of norms by 1/scale."""

    @property
    def num_updates(self) -> int:
        """Optimiser updates per step."""
        return self.mini_steps * self.epochs

    def torch_dtype(self, device: torch.device) -> torch.dtype:
        automatic = torch.bfloat16 if device.type == "cuda" else torch.float32
        return automatic if self.dtype == "auto" else getattr(torch, self.dtype)
