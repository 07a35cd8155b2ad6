"""The experts of a mixture. Rows are grouped by expert without sorting: every expert counts and places its own.

At decode sizes there are few rows for each expert, so that reading the weights is what takes time. The products for
that gather rows themselves, the first one, and put them back, the second: no row is copied. Weights are the left
operand, so that the wide side of the tensor cores is filled by outputs.

Shapes: N tokens, k experts per token, E experts, R = N*k rows, I inputs, O outputs.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.quant.kernels.triton_tiles import cdiv, power_of_2

MOST_ROWS = 64  # for each expert on average; above, the library's grouped product is faster


def group(ids_Nk: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(rows in the order of their experts [R], where each expert's begin [E + 1]). All ids are below E."""
    num_rows = ids_Nk.numel()
    ids = ids_Nk.contiguous()
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    order = torch.zeros(num_rows, dtype=torch.int32, device=ids.device)
    _count[(num_experts,)](ids, offsets, num_rows, BLOCK=1024, num_warps=4)
    offsets = offsets.cumsum(0, dtype=torch.int32)
    _place[(num_experts,)](ids, offsets, order, num_rows, BLOCK=1024, num_warps=4)
    return order, offsets


def product(x: Tensor, weight_EOI: Tensor, order: Tensor, offsets: Tensor, top_k: int, *, gather: bool) -> Tensor:
    """[R, O]. Gathered: `x` has a row per token and the result lies by expert; otherwise the other way round."""
    num_experts, outputs, inputs = weight_EOI.shape
    rows = len(order)
    y = x.new_empty(rows, outputs)
    block = min(64, max(16, power_of_2(2 * rows // num_experts)))
    grid = cdiv(outputs, 128), cdiv(rows, block) + min(num_experts, rows)
    _product[grid](
        x, weight_EOI, y, order, offsets, inputs, outputs, num_experts, top_k,
        EXPERTS=power_of_2(num_experts), GATHER=gather, BM=block, BN=128, BK=64,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4, num_stages=5,
    )  # fmt: skip
    return y


def combine(y: Tensor, weights_Nk: Tensor, order: Tensor | None = None) -> Tensor:
    """Σ_k weight_k · y_k, [N, O] of [N*k, O], which lie by token, or in `order`. Rounded as in transformers: products
    to the type of both, and the sum, which is float32, to that of y."""
    num_tokens, top_k = weights_Nk.shape
    outputs = y.shape[1]
    out = y.new_empty(num_tokens, outputs)
    place = None
    if order is not None:
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), dtype=order.dtype, device=order.device)
    _combine[num_tokens, cdiv(outputs, 1024)](
        y, weights_Nk.contiguous(), place, out, outputs, K=top_k, BLOCK=1024, num_warps=4, enable_fp_fusion=False
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _count(ids_ptr, offsets_ptr, num_rows, BLOCK: tl.constexpr):
    expert, count = tl.program_id(0), 0
    for first in range(0, num_rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        count += tl.sum((tl.load(ids_ptr + row, mask=row < num_rows, other=-1) == expert).to(tl.int32), 0)
    tl.store(offsets_ptr + expert + 1, count)


@triton.jit(do_not_specialize=["num_rows"])
def _place(ids_ptr, offsets_ptr, order_ptr, num_rows, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    place = tl.load(offsets_ptr + expert)
    for first in range(0, num_rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        own = (tl.load(ids_ptr + row, mask=row < num_rows, other=-1) == expert).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(own, 0) - 1, row, mask=own > 0)
        place += tl.sum(own, 0)


@triton.jit
def _product(
    x_ptr, w_ptr, y_ptr, order_ptr, offsets_ptr, inputs, outputs, num_experts, top_k,
    EXPERTS: tl.constexpr, GATHER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The rows of one expert in tiles of BM; a program finds its expert by counting the tiles before it."""
    tile, e = tl.program_id(1), tl.arange(0, EXPERTS)
    begin = tl.load(offsets_ptr + e, mask=e < num_experts, other=0)
    end = tl.load(offsets_ptr + e + 1, mask=e < num_experts, other=0)
    tiles = (end - begin + BM - 1) // BM
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    if expert < num_experts:
        before = tl.sum(tl.where(e < expert, tiles, 0), 0)
        row = tl.load(offsets_ptr + expert) + (tile - before) * BM + tl.arange(0, BM)
        real = row < tl.load(offsets_ptr + expert + 1)
        origin = tl.load(order_ptr + row, mask=real, other=0)
        source = origin // top_k if GATHER else row
        n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
        w_ptr += expert.to(tl.int64) * outputs * inputs
        acc = tl.zeros([BN, BM], tl.float32)
        for first in range(0, inputs, BK):
            within = first + k < inputs
            place = n[:, None] * inputs + first + k[None, :]
            w = tl.load(w_ptr + place, mask=(n < outputs)[:, None] & within[None, :], other=0.0)
            place = source.to(tl.int64)[:, None] * inputs + first + k[None, :]
            x = tl.load(x_ptr + place, mask=real[:, None] & within[None, :], other=0.0)
            acc = tl.dot(w, x.T, acc, input_precision=PRECISION)
        target = row if GATHER else origin
        place = target.to(tl.int64)[None, :] * outputs + n[:, None]
        tl.store(y_ptr + place, acc.to(y_ptr.dtype.element_ty), mask=real[None, :] & (n < outputs)[:, None])


@triton.jit
def _combine(y_ptr, weights_ptr, place_ptr, out_ptr, outputs, K: tl.constexpr, BLOCK: tl.constexpr):
    token, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    float32_weights: tl.constexpr = weights_ptr.dtype.element_ty == tl.float32
    kind: tl.constexpr = tl.float32 if float32_weights else y_ptr.dtype.element_ty
    acc = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        row = token * K + k
        weight = tl.load(weights_ptr + row).to(tl.float32)
        if place_ptr is not None:
            row = tl.load(place_ptr + row).to(tl.int64)
        y = tl.load(y_ptr + row * outputs + n, mask=n < outputs, other=0.0).to(tl.float32)
        acc += (y * weight).to(kind).to(tl.float32)
    tl.store(out_ptr + token * outputs + n, acc.to(out_ptr.dtype.element_ty), mask=n < outputs)
