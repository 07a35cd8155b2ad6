"""What stands between the matrix products of a decoder layer, for the learner: each one kernel, and one its gradient.

Forward they round where the engine's do (`pointwise.py`), and with it where the modules of transformers do. Gradients
are computed in float32 from what went in, which is all that is kept, and rounded once. Those of norms' weights are
summed up by each program over its share of the rows, and then over programs: in the same order every time.

Shapes: N tokens, H heads, D head size.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.models.kernels import pointwise
from lockstep.models.kernels.pointwise import gated, rotated_heads, warps
from lockstep.quant.kernels.triton_tiles import cdiv, multiprocessors, power_of_2

HEADS, TOKENS = 8, 4  # that a program rotates: at once, and one after the other
BLOCK = 1024  # values of gates
AT_ONCE = 8  # programs on each multiprocessor that sum up a weight's gradient


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, exact: bool = False) -> Tensor:
    """x / rms(x) · weight, over the last dimension; `exact` as in `pointwise.Exact`."""
    return _RMSNorm.apply(x, weight, eps, exact)


def rotated(
    x_NHD: Tensor, weight_D: Tensor | None, eps: float, rotary: tuple[Tensor, Tensor], *, exact: bool = False
) -> Tensor:
    """Heads, normalised if there is a weight to do it with, and then rotated by [1, N, D] cosines and sines."""
    cos, sin = (table.flatten(0, -2).contiguous() for table in rotary)
    assert cos.shape == sin.shape == (len(x_NHD), x_NHD.shape[-1])
    return _Rotated.apply(x_NHD, weight_D, eps, cos, sin, exact)


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    return _GatedSilu.apply(gate, up)


class _RMSNorm(torch.autograd.Function):
    """y = weight·n with n = s·x and s = 1 / rms(x); dx = s·(g − n·mean(g·n)) with g = weight·dy; dweight = Σ dy·n."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, exact: bool) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return pointwise.normed(x, weight, eps, exact=exact)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy, size = grads[0].contiguous(), x.shape[-1]
        rows, dx = x.numel() // size, torch.empty_like(x)
        programs = min(rows, AT_ONCE * multiprocessors(x.device))
        dweights = weight.new_empty(programs, size, dtype=torch.float32)
        block = power_of_2(size)
        if rows:
            _rms_norm_gradient[(programs,)](
                x, weight, dy, dx, dweights, ctx.eps, rows, size, BLOCK=block, num_warps=warps(block)
            )
        return dx, dweights.sum(0).to(weight.dtype), None, None


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, exact: bool
    ) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x if weight is not None else None, weight, cos, sin)
        ctx.eps = eps
        tokens, heads, size = x.shape
        y = torch.empty_like(x)
        if tokens:
            _rotate[cdiv(tokens, TOKENS), cdiv(heads, HEADS)](
                x, weight, cos, sin, y, eps, tokens, TOKENS=TOKENS, H=heads, HEADS=_heads(heads), D=size, EXACT=exact,
                num_warps=warps(HEADS * size), enable_fp_fusion=False,
            )  # fmt: skip
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin = ctx.saved_tensors
        dy = grads[0].contiguous()
        tokens, heads, size = dy.shape
        dx, blocks = torch.empty_like(dy), cdiv(heads, HEADS)
        programs = min(tokens, AT_ONCE * multiprocessors(dy.device))
        dweights = None if weight is None else weight.new_empty(blocks * programs, size, dtype=torch.float32)
        if tokens:
            _rotate_gradient[programs, blocks](
                x, weight, cos, sin, dy, dx, dweights, ctx.eps, tokens, H=heads, HEADS=_heads(heads), D=size,
                num_warps=warps(HEADS * size),
            )  # fmt: skip
        dweight = None if weight is None or dweights is None else dweights.sum(0).to(weight.dtype)
        return dx, dweight, *(None,) * 4


class _GatedSilu(torch.autograd.Function):
    """With σ = sigmoid(gate): dgate = dy·up·σ·(1 + gate·(1 − σ)) and dup = dy·gate·σ."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        y = torch.empty_like(gate)
        if gate.numel():
            _gate[(cdiv(gate.numel(), BLOCK),)](gate, up, y, gate.numel(), BLOCK=BLOCK, num_warps=warps(BLOCK))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dy, dgate, dup = grads[0].contiguous(), torch.empty_like(gate), torch.empty_like(up)
        if gate.numel():
            _gate_gradient[(cdiv(gate.numel(), BLOCK),)](
                gate, up, dy, dgate, dup, gate.numel(), BLOCK=BLOCK, num_warps=warps(BLOCK)
            )
        return dgate, dup


def _heads(heads: int) -> int:
    return min(HEADS, power_of_2(heads))


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_gradient(
    x_ptr, weight_ptr, dy_ptr, dx_ptr, dweights_ptr, eps, rows, size, BLOCK: tl.constexpr
):  # fmt: skip
    """Of every so-many-th row."""
    first, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + d, mask=d < size, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    for row in range(first, rows, tl.num_programs(0)):
        place = row * size + d
        x = tl.load(x_ptr + place, mask=d < size, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + place, mask=d < size, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
        n, g = scale * x, weight * dy
        dweight += dy * n
        tl.store(dx_ptr + place, scale * (g - n * (tl.sum(g * n, 0) / size)), mask=d < size)
    tl.store(dweights_ptr + first * size + d, dweight, mask=d < size)


@triton.jit(do_not_specialize=["num_tokens"])
def _rotate(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, y_ptr, eps, num_tokens, TOKENS: tl.constexpr, H: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * TOKENS
    h, d = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, D)
    kind: tl.constexpr = y_ptr.dtype.element_ty
    other, sign = (d + D // 2) % D, tl.where(d < D // 2, -1.0, 1.0)
    for token in range(begin, tl.minimum(begin + TOKENS, num_tokens)):
        cos = tl.load(cos_ptr + token * D + d).to(tl.float32)
        sin = tl.load(sin_ptr + token * D + d).to(tl.float32)
        row = token * H * D
        y = rotated_heads(
            x_ptr + row, weight_ptr, cos, sin, sign, h, d, other, eps, kind, H, D, weight_ptr is not None, EXACT
        )
        tl.store(y_ptr + row + h[:, None] * D + d, y, mask=(h < H)[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def _rotate_gradient(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, dy_ptr, dx_ptr, dweights_ptr, eps, num_tokens, H: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Of some heads of every so-many-th token: back by the same angle, then as in `_rms_norm_gradient`."""
    first, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    h, d = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, D)
    other, sign, there = (d + D // 2) % D, tl.where(d < D // 2, -1.0, 1.0), (h < H)[:, None]
    dweight = tl.zeros((HEADS, D), tl.float32)
    for token in range(first, num_tokens, programs):
        row = token * H * D
        cos = tl.load(cos_ptr + token * D + d).to(tl.float32)
        sin = tl.load(sin_ptr + token * D + other).to(tl.float32)
        heads = row + h[:, None] * D
        dy = tl.load(dy_ptr + heads + d, mask=there, other=0.0).to(tl.float32)
        partner = tl.load(dy_ptr + heads + other, mask=there, other=0.0).to(tl.float32)
        g = dy * cos - sign * partner * sin
        if weight_ptr is not None:
            x = tl.load(x_ptr + heads + d, mask=there, other=1.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
            n = scale * x
            dweight += g * n
            g = g * tl.load(weight_ptr + d).to(tl.float32)
            g = scale * (g - n * (tl.sum(g * n, 1) / D)[:, None])
        tl.store(dx_ptr + heads + d, g, mask=there)
    if weight_ptr is not None:
        tl.store(dweights_ptr + (tl.program_id(1) * programs + first) * D + d, tl.sum(dweight, 0))


@triton.jit
def _gate(gate_ptr, up_ptr, y_ptr, size, BLOCK: tl.constexpr):
    d = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + d, gated(gate_ptr, up_ptr, d, size), mask=d < size)


@triton.jit
def _gate_gradient(gate_ptr, up_ptr, dy_ptr, dgate_ptr, dup_ptr, size, BLOCK: tl.constexpr):
    d = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + d, mask=d < size, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + d, mask=d < size, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + d, mask=d < size, other=0.0).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-gate))
    tl.store(dgate_ptr + d, dy * up * sigmoid * (1 + gate * (1 - sigmoid)), mask=d < size)
    tl.store(dup_ptr + d, dy * gate * sigmoid, mask=d < size)
