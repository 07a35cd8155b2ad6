"""What keeps the policy near a reference model: an estimate of KL(π_θ ‖ π_ref) per sampled token, in loss or reward.

In the loss: reduce(correction · (surrogate + coef·k(ℓ, ℓref))). In the reward: R' = R − coef·Σ k(ℓp, ℓref) over the
answer's sampled tokens, before the advantage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol

from pydantic import Field, model_validator
from torch import Tensor

from lockstep.config import Config, Plugin, plugin

ESTIMATORS = "lockstep.algorithms.kl"


class KL(Protocol):
    """An estimator of KL(π_θ ‖ π_ref) at tokens drawn from π_θ."""

    in_loss: ClassVar[bool]  # whether its gradient pulls towards the reference too

    def __call__(self, logp: Tensor, logp_ref: Tensor) -> Tensor:
        """ℓ and ℓref of any one shape, to an estimate for each token."""
        ...


@dataclass(frozen=True, slots=True)
class Penalty:
    """coef·Σ k(ℓp, ℓref): what an answer's sampled tokens take off its reward."""

    kl: KL
    coef: float

    def __call__(self, logp_prox: Tensor, logp_ref: Tensor) -> float:
        return self.coef * self.kl(logp_prox.double(), logp_ref.double()).sum().item()


class KLConfig(Config):
    """How the policy is kept near a reference model, which then takes memory and a forward of its own."""

    estimator: Annotated[Plugin, plugin(ESTIMATORS)] = Plugin(package=ESTIMATORS, name="k3")
    """What is computed of ℓ and ℓref."""
    coef: float = Field(default=1e-3, gt=0)
    """Its weight."""
    where: Literal["loss", "reward"] = "loss"
    """A term of the loss, or taken off each answer's reward: then answers of equal reward differ by it alone."""
    reference: str = ""
    """The checkpoint to stay near; unset: the model as it was before the first step of RL."""

    @model_validator(mode="after")
    def _pulls(self) -> KLConfig:
        name, cls = self.estimator.name, self.estimator.cls
        if not hasattr(cls, "in_loss"):
            raise ValueError(f"{name!r} has no in_loss; see algorithms/reference.py")
        if self.where == "loss" and not cls.in_loss:  # type: ignore[attr-defined]
            raise ValueError(f'{name} in the loss has zero expected gradient: use k2 or k3 there, or where = "reward"')
        return self
