"""What stands between the matrix products of a decoder layer, in few operators of torch: where no kernels of ours run.

The same functions as in `kernels/pointwise.py`. They compute bit for bit what the modules of transformers do; what they
save is the time between operators, which is most of a small model's step on a CPU.

Shapes: N tokens, HQ query heads, H key/value heads, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.models.kv import Pages
from lockstep.quant.inputs import EncodedInput, InputCode, Rows
from lockstep.quant.kernels import encode


def rms_norm(x: Tensor, weight: Tensor, eps: float, code: InputCode | None = None) -> Rows:
    """x / rms(x) · weight, over the last dimension."""
    return _encoded(_scaled(x, eps).mul_(weight), code)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, code: InputCode | None = None
) -> tuple[Tensor, Rows]:
    """(sum, norm of the sum)."""
    total = residual + x
    return total, rms_norm(total, weight, eps, code)


def gated_silu(gate_up: Tensor, code: InputCode | None = None) -> Rows:
    """silu(gate) · up, where the last dimension holds both, one after the other."""
    gate, up = gate_up.chunk(2, -1)
    return _encoded(F.silu(gate).mul_(up), code)


def rotate_and_store(
    qkv_N: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    rotary: tuple[Tensor, Tensor],
    slots_N: Tensor,
    cache: Pages,
) -> Tensor:
    """Queries [N, HQ, D], normalised (if the model does) and rotated; keys likewise and values go to their slots."""
    heads, size = cache.keys.shape[2:]
    vectors = qkv_N.unflatten(1, (-1, size))
    counts = [vectors.shape[1] - 2 * heads, heads]
    both, value = vectors.split([sum(counts), heads], 1)
    if norms is not None:
        both = _scaled(both, eps)
        for part, weight in zip(both.split(counts, 1), norms, strict=True):
            part.mul_(weight)
    query, key = _rotated(both, *rotary).split(counts, 1)
    cache.store(slots_N, key, value)
    return query


def _scaled(x: Tensor, eps: float) -> Tensor:
    """Weights are multiplied afterwards, where transformers does: within `rms_norm` they would not be rounded alike."""
    return F.rms_norm(x, x.shape[-1:], eps=eps)


def _rotated(x_NHD: Tensor, cos_1ND: Tensor, sin_1ND: Tensor) -> Tensor:
    cos, sin = cos_1ND.transpose(0, 1), sin_1ND.transpose(0, 1)
    first, second = x_NHD.chunk(2, -1)
    return (x_NHD * cos).add_(torch.cat((-second, first), -1).mul_(sin))


def _encoded(x: Tensor, code: InputCode | None) -> Rows:
    if code is None:
        return x
    return EncodedInput(encode(code.quantizer, x.flatten(0, -2)), code, x.shape, x.dtype)
