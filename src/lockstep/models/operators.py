"""What each weight of a module is computed with, and a digest of its bytes: one side of the audit.

Both sides are read off the modules that run, not off a plan: a layer that was left out shows as what it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lockstep.models.lowbit import LowBitWeights
from lockstep.quant.encoded import Encoded
from lockstep.quant.format import Format
from lockstep.quant.modules import low_bit_weights, straight_through_weights
from lockstep.types import Operator


def engine_operators(
    view: nn.Module, dtype: torch.dtype, names: Sequence[str] | None = None
) -> dict[str, Operator]:
    """Of the engine's view of a model that computes in `dtype`."""
    low_bit = dict(low_bit_weights(view))
    inside = tuple(f"{name}." for name in low_bit)
    plain = {name: t for name, t in view.state_dict().items() if not name.startswith(inside)}
    found = {name: (lambda w=w: _low_bit(w.format, w.encoded, dtype)) for name, w in low_bit.items()}
    found |= {name: (lambda t=t: _plain(t)) for name, t in plain.items()}
    return {name: found[name]() for name in (names if names is not None else found)}


def learner_operators(
    module: nn.Module,
    weights: Mapping[str, Tensor],
    low_bit: LowBitWeights | None,
    dtype: torch.dtype,
    names: Sequence[str] | None = None,
) -> dict[str, Operator]:
    """Of the learner's module; `weights` and `low_bit` are what it publishes, and give the digests."""
    aligned = dict(straight_through_weights(module))
    encoded = low_bit.encoded if low_bit else {}
    found = {}
    for name in names if names is not None else weights:
        runs = _low_bit(aligned[name], encoded[name], dtype) if name in aligned else _plain(weights[name])
        published = encoded[name].tensors.values() if name in encoded else [weights[name]]
        found[name] = Operator(format=runs.format, kernel=runs.kernel, digest=digest(published))
    return found


def _low_bit(format: Format, weight: Encoded, dtype: torch.dtype) -> Operator:
    return Operator(
        format=type(format).__module__.rpartition(".")[2],
        kernel=format.kernel(weight, dtype).name,
        digest=digest(weight.tensors.values()),
    )


def _plain(weight: Tensor) -> Operator:
    return Operator(format=str(weight.dtype).removeprefix("torch."), kernel="torch", digest=digest([weight]))


@torch.no_grad()
def digest(tensors: Iterable[Tensor]) -> int:
    """Of bytes and their places, computed where they are; equal for equal bytes on any device."""
    total = 0
    for tensor in tensors:
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
        words = nn.functional.pad(raw, (0, -len(raw) % 8)).view(torch.int64)
        places = torch.arange(1, 2 * len(words), 2, device=words.device)  # odd, so that no word is multiplied away
        total = (total * 31 + int((words * places).sum())) % 2**64
    return total
