"""Which algorithm: a surrogate and, where they differ from its usual ones, its companions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import model_validator

from lockstep.algorithms.objective import Objective
from lockstep.algorithms.pieces import Advantage
from lockstep.config import Config, Plugin, plugin

PACKAGE = "lockstep.algorithms"
COMPANIONS = ("advantage", "reduction", "dynamic_sampling")  # class variables of every surrogate


class AlgorithmConfig(Config):
    """`surrogate = "dapo"` is enough; everything else then is what DAPO's paper uses, with truncated weights."""

    surrogate: Annotated[Plugin, plugin(f"{PACKAGE}.surrogates")]
    """The loss per token."""
    advantage: Annotated[Plugin | None, plugin(f"{PACKAGE}.advantages")] = None
    """How rewards become advantages; unset: the surrogate's usual one."""
    correction: Annotated[Plugin, plugin(f"{PACKAGE}.corrections")] = Plugin(
        package=f"{PACKAGE}.corrections", name="tis"
    )
    """What makes up for the sampler not being the learner."""
    reduction: Annotated[Plugin | None, plugin(f"{PACKAGE}.reductions")] = None
    """How tokens become one number; unset: the surrogate's usual one."""
    dynamic_sampling: bool | None = None
    """Replace groups whose rewards are all equal by new ones; unset: as the surrogate's paper does."""
    truncated: Literal["mask", "keep"] = "mask"
    """An answer cut off by the token limit: left out of training and of its group's mean, or kept as judged."""
    value_coef: float = 0.5
    """Weight of the value head's loss, for advantages that need one."""

    @model_validator(mode="after")
    def _has_companions(self) -> AlgorithmConfig:
        missing = [name for name in COMPANIONS if not hasattr(self.surrogate.cls, name)]
        if missing:
            raise ValueError(
                f"the surrogate {self.surrogate.name!r} has no {', '.join(missing)}; see algorithms/pieces.py"
            )
        return self

    @property
    def advantage_plugin(self) -> Plugin:
        return self.advantage or Plugin(package=f"{PACKAGE}.advantages", name=self.surrogate.cls.advantage)

    @property
    def reduction_plugin(self) -> Plugin:
        return self.reduction or Plugin(package=f"{PACKAGE}.reductions", name=self.surrogate.cls.reduction)

    @property
    def replaces_groups(self) -> bool:
        """Whether groups without signal are replaced."""
        return self.surrogate.cls.dynamic_sampling if self.dynamic_sampling is None else self.dynamic_sampling

    @property
    def needs_values(self) -> bool:
        """Whether the learner needs a value head."""
        return self.advantage_plugin.cls.needs_values

    def build_advantage(self) -> Advantage:
        return self.advantage_plugin.build()

    def build_objective(self) -> Objective:
        return Objective(
            surrogate=self.surrogate.build(),
            correction=self.correction.build(),
            reduction=self.reduction_plugin.build(),
            value_coef=self.value_coef if self.needs_values else 0.0,
        )
