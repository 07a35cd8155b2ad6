"""What each weight of a module is computed with, and a digest of its bytes: one side of the audit.

Both sides are read off the modules that run, not off a plan: a layer that was left out shows as what it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lockstep.config.plugins import name_of
from lockstep.quant.encoded import Encoded
from lockstep.quant.format import Format
from lockstep.quant.modules import low_bit_weights, straight_through_weights
from lockstep.types import Operator

CHUNK = 2**24  # words digested at once, which bounds the memory it takes


def engine_operators(view: nn.Module, dtype: torch.dtype, names: Sequence[str] | None = None) -> dict[str, Operator]:
    """Of the engine's view of a model that computes in `dtype`: of those of these weights that it has, or all."""
    low_bit = dict(low_bit_weights(view))
    plain = view.state_dict()
    if names is None:
        inside = tuple(f"{name}." for name in low_bit)
        names = [*low_bit, *(name for name in plain if not name.startswith(inside))]
    return {
        name: _low_bit(low_bit[name].format, low_bit[name].encoded, dtype) if name in low_bit else _plain(plain[name])
        for name in names
        if name in low_bit or name in plain
    }


def learner_operators(
    module: nn.Module, weights: Mapping[str, Tensor], encoded: Mapping[str, Encoded], dtype: torch.dtype
) -> dict[str, Operator]:
    """Of the learner's module, for these weights. What it publishes for them, `encoded` if there is, is digested."""
    aligned = dict(straight_through_weights(module))
    found = {}
    for name, weight in weights.items():
        if name in aligned:
            found[name] = _low_bit(aligned[name], encoded[name], dtype)
        else:
            found[name] = _plain(weight, published=encoded.get(name))
    return found


def _low_bit(format: Format, weight: Encoded, dtype: torch.dtype) -> Operator:
    return Operator(
        format=name_of(type(format)),
        kernel=format.kernel(weight, dtype).name,
        digest=digest(weight.tensors.values()),
    )


def _plain(weight: Tensor, published: Encoded | None = None) -> Operator:
    bytes_of = published.tensors.values() if published else [weight]
    return Operator(format=str(weight.dtype).removeprefix("torch."), kernel="torch", digest=digest(bytes_of))


@torch.no_grad()
def digest(tensors: Iterable[Tensor]) -> int:
    """Of bytes and their places, computed where they are; equal for equal bytes on any device."""
    total = 0
    for tensor in tensors:
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for part in nn.functional.pad(raw, (0, -len(raw) % 8)).view(torch.int64).split(CHUNK):
            places = torch.arange(1, 2 * len(part), 2, device=part.device)  # odd, so that no word is multiplied away
            total = (total * 31 + int((part * places).sum())) % 2**64
    return total
