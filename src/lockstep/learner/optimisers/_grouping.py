"""Which parameter is treated how, decided by its name and shape alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

Decay = Annotated[float, Field(ge=0, lt=1)]  # of a running mean, per update
Named = Sequence[tuple[str, Tensor]]

ROUTERS = {"gate", "router", "shared_expert_gate"}
EMBEDDINGS = {"wte", "wpe"}


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """True for a matrix between hidden activations: attention and MLP projections, and fused experts [E, rows, cols].

    Not embeddings and output heads (their rows are tokens, not directions), nor routers, biases, norms, convolutions.
    """
    *owners, leaf = name.split(".")
    if leaf.endswith("bias") or min(parameter.shape[-2:], default=1) == 1:
        return False
    if is_embedding(name) or any(owner in ROUTERS or owner.endswith("head") for owner in owners):
        return False
    return parameter.ndim == 2 or (parameter.ndim == 3 and "experts" in owners)


def is_embedding(name: str) -> bool:
    return any("embed" in part or part in EMBEDDINGS for part in name.split("."))


def decays(name: str, parameter: Tensor) -> bool:
    """Weight decay is for matrices: never for norms, biases (a fused expert's is 2-D) or embeddings."""
    return parameter.ndim >= 2 and not name.endswith("bias") and not is_embedding(name)


def decay_groups(named: Named, weight_decay: float, **options: Any) -> list[dict[str, Any]]:
    """Parameter groups of an optimiser: those that decay, then those that do not; an empty one is left out."""
    decayed, kept = partition(named, decays)
    groups = ({"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0})
    return [group | options for group in groups if group["params"]]


def partition(named: Named, holds: Callable[[str, Tensor], bool]) -> tuple[Named, Named]:
    """The parameters for which `holds` is true and the others, each in their order."""
    return [pair for pair in named if holds(*pair)], [pair for pair in named if not holds(*pair)]
