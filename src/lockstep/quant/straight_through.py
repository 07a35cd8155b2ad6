"""Low-bit forward, high-precision backward (QaRL): what the learner runs in place of a linear layer.

The forward is the engine's own product on the engine's own codes. The backward is that of the function that was
executed, in the dtype of the gradient: dX = dY·deq(Ŵ) and dW = dYᵀ·deq(X̂), the latter to the master weight, as if
rounding had slope 1. Kept for it are X̂ as it was multiplied (for 8-bit inputs K + 4 bytes a row instead of 2·K in
bfloat16; in w4a16 x itself) and references to Ŵ, which the learner holds anyway. Changing Ŵ in place between forward
and backward raises, as it does for any saved tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lockstep.quant.encoded import Encoded
from lockstep.quant.format import Format


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, encoded: Encoded, format: Format) -> Tensor:
    """`format.linear` on `encoded`; the gradient goes to x, to `weight`, of which `encoded` was made, and to `bias`."""
    return linears(x, [(weight, bias, encoded)], format)[0]


def linears(x: Tensor, layers: Sequence[tuple[Tensor, Tensor | None, Encoded]], format: Format) -> list[Tensor]:
    """The same of several (weight, bias, encoded) that share their input: it is encoded, kept and decoded once."""
    weights, biases, encoded = zip(*layers, strict=True)
    found = _Linears.apply(x.flatten(0, -2), encoded, format, *weights)
    found = [y if bias is None else y + bias for y, bias in zip(found, biases, strict=True)]
    return [y.unflatten(0, x.shape[:-1]) for y in found]


def grouped(x: Tensor, offsets: Tensor, weight: Tensor, encoded: Encoded, format: Format) -> Tensor:
    """The same for the rows [N, in] of experts: `format.grouped` with gradients to x and to `weight` [E, out, in]."""
    return _Grouped.apply(x, offsets, weight, encoded, format)


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, encoded: Sequence[Encoded], format: Format, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        rows = format.encode_input(x)
        _save(ctx, rows, encoded, format, weights[0].dtype)
        return tuple(format.matmul(rows, weight, x.dtype) for weight in encoded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wants_x, _, _, *wants_weights = ctx.needs_input_grad
        (rows, encoded, _), dtype, dx = _saved(ctx), grads[0].dtype, None
        if wants_x:
            for dy, weight in zip(grads, encoded, strict=True):
                dx = _plus_product(dx, dy, ctx.format.dequantize(weight, dtype))
        x = ctx.format.decode_input(rows, dtype) if any(wants_weights) else None
        dw = [
            (dy.mT @ x).to(ctx.weight_dtype) if wanted and x is not None else None
            for dy, wanted in zip(grads, wants_weights, strict=True)
        ]
        return dx, None, None, *dw


def _plus_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    return a @ b if total is None else total.addmm_(a, b)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor, weight: Tensor, encoded: Encoded, format: Format) -> Tensor:
        rows = format.encode_input(x)
        _save(ctx, rows, [encoded], format, weight.dtype, offsets)
        return format.grouped_matmul(rows, offsets, encoded, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        wants_x, _, wants_weight, *_ = ctx.needs_input_grad
        rows, (encoded,), (offsets,) = _saved(ctx)
        dx = rows_by_expert(dy, offsets, ctx.format.dequantize(encoded, dy.dtype)) if wants_x else None
        x = ctx.format.decode_input(rows, dy.dtype) if wants_weight else None
        dw = None if x is None else weights_by_expert(dy, x, offsets).to(ctx.weight_dtype)
        return dx, None, dw, None, None


def _save(
    ctx: Any, rows: tuple[Tensor, ...], encoded: Sequence[Encoded], format: Format, dtype: torch.dtype, *more: Tensor
) -> None:
    codes = [tensor for weight in encoded for tensor in (weight.codes, weight.scales)]
    ctx.save_for_backward(*codes, *rows, *more)
    ctx.shapes, ctx.format, ctx.weight_dtype = [weight.shape for weight in encoded], format, dtype
    ctx.num_rows = len(rows)


def _saved(ctx: Any) -> tuple[tuple[Tensor, ...], list[Encoded], tuple[Tensor, ...]]:
    """Encoded input, weights, and what else was saved: read once, for activation checkpointing allows no more."""
    saved, num = iter(ctx.saved_tensors), ctx.num_rows
    encoded = [Encoded(next(saved), next(saved), shape) for shape in ctx.shapes]
    rest = tuple(saved)
    return rest[:num], encoded, rest[num:]


def rows_by_expert(dy: Tensor, offsets: Tensor, weight: Tensor) -> Tensor:
    """[N, in]: each row of dy [N, out] times its own expert's weight [E, out, in]."""
    if _has_grouped_product(dy):
        return torch.nn.functional.grouped_mm(dy, weight, offs=offsets[1:])
    dx = dy.new_zeros(len(dy), weight.shape[-1])
    for expert, rows in _slices(offsets):
        torch.mm(dy[rows], weight[expert], out=dx[rows])
    return dx


def weights_by_expert(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """[E, out, in]: dyᵀ·x over each expert's own rows; zero for an expert that has none."""
    if _has_grouped_product(dy):
        return torch.nn.functional.grouped_mm(dy.mT, x, offs=offsets[1:])
    dw = dy.new_zeros(len(offsets) - 1, dy.shape[-1], x.shape[-1])
    for expert, rows in _slices(offsets):
        torch.mm(dy[rows].mT, x[rows], out=dw[expert])
    return dw


def _has_grouped_product(dy: Tensor) -> bool:
    return dy.is_cuda and dy.dtype == torch.bfloat16


def _slices(offsets: Tensor) -> list[tuple[int, slice]]:
    """The experts that have rows, and which. Waits for the device."""
    bounds = offsets.tolist()
    ends = enumerate(pairwise(bounds))
    return [(expert, slice(start, end)) for expert, (start, end) in ends if start < end]
