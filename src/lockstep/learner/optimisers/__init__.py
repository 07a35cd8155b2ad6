"""Optimisers by name: each file holds a dataclass of options that, called with parameters, builds the optimiser."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lockstep.config import Plugin


def build_optimiser(
    plugin: Plugin,
    named_parameters: Iterable[tuple[str, Tensor]],
    learning_rate: float,
    weight_decay: float,
    rates: Mapping[str, float] | None = None,
) -> Optimizer:
    """The chosen optimiser over float32 parameters (see `precision.MasterWeights.named_parameters`).

    Names decide a parameter's treatment, their order its place in the state: a resume must give the same ones.
    `rates` multiply the learning rates of the parameters they name; decay, which multiplies weights, stays as it was.
    """
    optimiser = plugin.build()(list(named_parameters), learning_rate, weight_decay)
    optimiser.param_groups = [part for group in optimiser.param_groups for part in _split(group, rates or {})]
    set_learning_rate(optimiser, learning_rate)
    return optimiser


def _split(group: dict[str, Any], rates: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """A parameter group as one group for each rate in it."""
    named_by_rate: dict[float, list[tuple[str, Tensor]]] = {}
    for name, parameter in zip(group["param_names"], group["params"], strict=True):
        named_by_rate.setdefault(rates.get(name, 1.0), []).append((name, parameter))
    for rate, named in named_by_rate.items():
        names, parameters = map(list, zip(*named, strict=True))
        decay = group["weight_decay"] / rate
        yield group | {"param_names": names, "params": parameters, "rate": rate, "weight_decay": decay}


def set_learning_rate(optimiser: Optimizer, learning_rate: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = learning_rate * group["rate"]
