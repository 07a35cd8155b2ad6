"""Optimisers by name: each file holds a dataclass of options that, called with parameters, builds the optimiser."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from lockstep.config import Plugin


def build_optimiser(
    plugin: Plugin, named_parameters: Iterable[tuple[str, Tensor]], learning_rate: float, weight_decay: float
) -> Optimizer:
    """The chosen optimiser over float32 parameters (see `precision.MasterWeights.named_parameters`).

    Names decide a parameter's treatment, their order its place in the state: a resume must give the same ones.
    """
    return plugin.build()(list(named_parameters), learning_rate, weight_decay)


def set_learning_rate(optimiser: Optimizer, learning_rate: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = learning_rate
