"""Sums and maxima that add up over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]  # over ranks


@dataclass(slots=True)
class Tally:
    """Tables by name, kept as float64 tensors so that a step on a device never waits for the host."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, sums: Tensor) -> None:
        self.sums[name] = self.sums[name] + sums if name in self.sums else sums

    def raise_to(self, name: str, maxima: Tensor) -> None:
        self.maxima[name] = torch.maximum(self.maxima[name], maxima) if name in self.maxima else maxima

    def combine(self, sum_all: Reduce, max_all: Reduce) -> None:
        """Over ranks, in two collectives; every rank must have tallied the same names in the same order.

        The tables are replaced, not changed: a shallow copy can be combined while the original goes on counting.
        """
        self.sums, self.maxima = _at_once(self.sums, sum_all), _at_once(self.maxima, max_all)

    def on_host(self) -> Tally:
        """The one place where the host waits for the device, once for all sums and once for all maxima."""
        return Tally(_at_once(self.sums, Tensor.cpu), _at_once(self.maxima, Tensor.cpu))


def _at_once(tables: Mapping[str, Tensor], change: Reduce) -> dict[str, Tensor]:
    """`change` applied to all tables laid end to end."""
    if not tables:
        return {}
    flat = change(torch.cat([table.flatten() for table in tables.values()]))
    parts = flat.split([table.numel() for table in tables.values()])
    return {name: part.view(table.shape) for (name, table), part in zip(tables.items(), parts, strict=True)}
