"""Which algorithm: a surrogate and, where they differ from its usual ones, its companions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lockstep.algorithms.corrections._product import Product
from lockstep.algorithms.objective import Objective
from lockstep.algorithms.pieces import Advantage, Companions, NamedCorrection
from lockstep.algorithms.reference import KLConfig, Penalty
from lockstep.algorithms.rules import refusal
from lockstep.config import Config, Plugin, plugin

PACKAGE = "lockstep.algorithms"
SURROGATES, ADVANTAGES = f"{PACKAGE}.surrogates", f"{PACKAGE}.advantages"
CORRECTIONS, REDUCTIONS = f"{PACKAGE}.corrections", f"{PACKAGE}.reductions"


class AlgorithmConfig(Config):
    """`surrogate = "dapo"` is enough; everything else then is what DAPO's paper uses, with truncated weights."""

    surrogate: Annotated[Plugin, plugin(SURROGATES)]
    """The loss per token."""
    advantage: Annotated[Plugin | None, plugin(ADVANTAGES)] = None
    """How rewards become advantages; unset: the surrogate's usual one."""
    correction: Annotated[Plugin | tuple[Plugin, ...] | None, plugin(CORRECTIONS, several=True)] = None
    """What makes up for the sampler not being the learner; a list multiplies; unset: the surrogate's usual one."""
    reduction: Annotated[Plugin | None, plugin(REDUCTIONS)] = None
    """How tokens become one number; unset: the surrogate's usual one."""
    dynamic_sampling: bool | None = None
    """Replace groups whose rewards are all equal by new ones; unset: as the surrogate's paper does."""
    truncated: Literal["mask", "keep"] = "mask"
    """An answer cut off by the token limit: left out of training and of its group's mean, or kept as judged."""
    value_coef: float = Field(default=0.5, ge=0)
    """Weight of the value head's loss, for advantages that need one."""
    kl: KLConfig | None = None
    """Keeps the policy near a reference model; unset: there is none."""

    @model_validator(mode="after")
    def _says_what_it_is(self) -> AlgorithmConfig:
        """What a class of the user's own may lack."""
        needed = [(self.surrogate, "companions"), *((correction, "weighs") for correction in self._given_corrections)]
        for piece, name in needed:
            if not hasattr(piece.cls, name):
                raise ValueError(f"{piece.name!r} has no {name}; see algorithms/pieces.py")
        return self

    @model_validator(mode="after")
    def _means_something(self) -> AlgorithmConfig:
        if reason := refusal(self.surrogate, self.correction_plugins):
            raise ValueError(reason)
        return self

    @property
    def companions(self) -> Companions:
        return self.surrogate.cls.companions  # type: ignore[attr-defined]

    @property
    def advantage_plugin(self) -> Plugin:
        return self.advantage or Plugin(package=ADVANTAGES, name=self.companions.advantage)

    @property
    def reduction_plugin(self) -> Plugin:
        return self.reduction or Plugin(package=REDUCTIONS, name=self.companions.reduction)

    @property
    def correction_plugins(self) -> tuple[Plugin, ...]:
        """Those given or, if none is, the surrogate's usual one with the option the two share."""
        if self.correction is not None:
            return self._given_corrections
        shared = self.companions.shares
        options = {shared: getattr(self.surrogate.build(), shared)} if shared else {}
        return (Plugin(package=CORRECTIONS, name=self.companions.correction, options=options),)

    @property
    def _given_corrections(self) -> tuple[Plugin, ...]:
        return (self.correction,) if isinstance(self.correction, Plugin) else self.correction or ()

    @property
    def replaces_groups(self) -> bool:
        """Whether groups without signal are replaced."""
        return self.companions.dynamic_sampling if self.dynamic_sampling is None else self.dynamic_sampling

    def written_out(self) -> AlgorithmConfig:
        """The same, with the surrogate's usual companions named where none was given."""
        given = self.correction_plugins
        return self.model_copy(
            update={
                "advantage": self.advantage_plugin,
                "correction": given[0] if len(given) == 1 else given,
                "reduction": self.reduction_plugin,
                "dynamic_sampling": self.replaces_groups,
            }
        )

    @property
    def needs_values(self) -> bool:
        """Whether the learner needs a value head."""
        return self.advantage_plugin.cls.needs_values

    def build_advantage(self) -> Advantage:
        return self.advantage_plugin.build()

    def build_penalty(self) -> Penalty | None:
        """What goes off the reward, if anything does."""
        if self.kl is None or self.kl.where == "loss":
            return None
        return Penalty(self.kl.estimator.build(), self.kl.coef)

    def build_objective(self) -> Objective:
        corrections: tuple[NamedCorrection, ...] = tuple(piece.build() for piece in self.correction_plugins)
        kl = self.kl if self.kl and self.kl.where == "loss" else None
        return Objective(
            surrogate=self.surrogate.build(),
            correction=corrections[0] if len(corrections) == 1 else Product(corrections),
            reduction=self.reduction_plugin.build(),
            value_coef=self.value_coef if self.needs_values else 0.0,
            kl=kl.estimator.build() if kl else None,
            kl_coef=kl.coef if kl else 0.0,
        )
