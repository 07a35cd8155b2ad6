"""Attention over pages in Triton: one query each (decode) and chunks of queries (prefill).

What `paged.attend` computes in torch, without gathering pages: keys and values are read where they lie, once per
key/value head for all of its G queries. Scores, softmax and sums are float32; the weights of the values are rounded to
the cache's type before the product, as flash attention does.

Shapes: B sequences, N tokens, H key/value heads, G queries per key/value head, D head size, P pages, S page size.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1.4426950408889634


def decode(
    query_BHD: Tensor,
    keys: Tensor,
    values: Tensor,
    pages_BP: Tensor,
    lengths_B: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """One query per sequence, which sees the first `lengths` keys of its pages (or the last `window` of these)."""
    batch, num_queries, size = query_BHD.shape
    _, page_size, heads, _ = keys.shape
    group = num_queries // heads
    out = torch.empty_like(query_BHD)
    splits = num_splits(batch * heads, multiprocessors(query_BHD.device))
    shapes = {"H": heads, "G": group, "GP": max(16, triton.next_power_of_2(group)), "D": size}
    partial = out
    if splits > 1:
        partial = query_BHD.new_empty(splits, batch, num_queries, size + 2, dtype=torch.float32)
    _decode[batch, heads, splits](
        query_BHD, keys, values, pages_BP, lengths_B, partial, scale * LOG2E, pages_BP.stride(0),
        **shapes, S=page_size, BLOCK_N=64, SPLITS=splits, WINDOW=window or 0, PRECISION=_precision(keys),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _combine[batch, num_queries](partial, out, D=size, SPLITS=splits, num_warps=1)
    return out


def prefill(
    query_NHD: Tensor,
    keys: Tensor,
    values: Tensor,
    pages_BP: Tensor,
    start_B: Tensor,
    count_B: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """`count` queries per sequence, end to end, from position `start` on; each sees the keys up to its own."""
    _, num_queries, size = query_NHD.shape
    _, page_size, heads, _ = keys.shape
    out = torch.empty_like(query_NHD)
    first_B = count_B.cumsum(0) - count_B
    start_B, count_B = start_B.contiguous(), count_B.contiguous()
    block = 64 if longest <= 64 or size > 128 else 128
    _prefill[triton.cdiv(longest, block), num_queries, len(count_B)](
        query_NHD, keys, values, pages_BP, first_B, start_B, count_B, out, scale * LOG2E,
        pages_BP.stride(0), HQ=num_queries, H=heads, D=size, S=page_size, BLOCK_M=block, BLOCK_N=64,
        WINDOW=window or 0, PRECISION=_precision(keys), num_warps=8 if block == 128 else 4, num_stages=2,
    )  # fmt: skip
    return out


def num_splits(programs: int, processors: int) -> int:
    """Into how many pieces keys are cut so that a small batch still fills the device: a power of two, at most 32."""
    return min(32, triton.next_power_of_2(max(1, 4 * processors // programs)))


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _precision(keys: Tensor) -> str:
    return "ieee" if keys.dtype == torch.float32 else "tf32"


@triton.jit
def _decode(
    q_ptr, k_ptr, v_ptr, pages_ptr, lengths_ptr, out_ptr, scale, page_stride,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, S: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    b, h, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + b).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, BLOCK_N), SPLITS) * BLOCK_N
    low, high = split * share, tl.minimum(length, (split + 1) * share)
    visible = 0
    if WINDOW:
        visible = tl.maximum(length - WINDOW, 0)
        low = tl.maximum(low, visible // BLOCK_N * BLOCK_N)

    g, d, n = tl.arange(0, GP), tl.arange(0, D), tl.arange(0, BLOCK_N)
    query_rows = (b * H + h) * G + g
    q = tl.load(q_ptr + query_rows[:, None] * D + d, mask=(g < G)[:, None], other=0.0)
    top = tl.full([GP], float("-inf"), tl.float32)
    mass = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, D], tl.float32)
    for first in range(low, high, BLOCK_N):
        place = first + n
        seen = (place < high) & (place >= visible)
        page = tl.load(pages_ptr + b * page_stride + place // S, mask=place < high, other=0).to(tl.int64)
        row = ((page * S + place % S) * H + h) * D
        k = tl.load(k_ptr + row[:, None] + d, mask=seen[:, None], other=0.0)
        scores = tl.where(seen, tl.dot(q, k.T, input_precision=PRECISION) * scale, float("-inf"))
        larger = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        weight = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(top - shift)
        mass = mass * fade + tl.sum(weight, 1)
        v = tl.load(v_ptr + row[:, None] + d, mask=seen[:, None], other=0.0)
        acc = acc * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        top = larger

    if SPLITS == 1:
        acc = acc / mass[:, None]
        tl.store(out_ptr + query_rows[:, None] * D + d, acc.to(out_ptr.dtype.element_ty), mask=(g < G)[:, None])
    else:
        rows = (split.to(tl.int64) * tl.num_programs(0) * H * G + query_rows) * (D + 2)
        tl.store(out_ptr + rows[:, None] + d, acc, mask=(g < G)[:, None])
        tl.store(out_ptr + rows + D, top, mask=g < G)
        tl.store(out_ptr + rows + D + 1, mass, mask=g < G)


@triton.jit
def _combine(partial_ptr, out_ptr, D: tl.constexpr, SPLITS: tl.constexpr):
    """Sums the pieces of one query: each has its own largest score (in powers of two) and mass."""
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    s, d = tl.arange(0, SPLITS), tl.arange(0, D)
    pieces = (s.to(tl.int64) * tl.num_programs(0) * tl.num_programs(1) + row) * (D + 2)
    top = tl.load(partial_ptr + pieces + D)
    weight = tl.exp2(top - tl.max(top, 0))
    mass = tl.sum(weight * tl.load(partial_ptr + pieces + D + 1), 0)
    acc = tl.sum(weight[:, None] * tl.load(partial_ptr + pieces[:, None] + d), 0)
    tl.store(out_ptr + row * D + d, (acc / mass).to(out_ptr.dtype.element_ty))


@triton.jit
def _prefill(
    q_ptr, k_ptr, v_ptr, pages_ptr, first_ptr, start_ptr, count_ptr, out_ptr, scale, page_stride,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    count = tl.load(count_ptr + b).to(tl.int32)
    begin = block * BLOCK_M
    if begin < count:
        start, first = tl.load(start_ptr + b).to(tl.int32), tl.load(first_ptr + b).to(tl.int64)
        m, d, n = begin + tl.arange(0, BLOCK_M), tl.arange(0, D), tl.arange(0, BLOCK_N)
        query_rows = ((first + m) * HQ + head) * D
        q = tl.load(q_ptr + query_rows[:, None] + d, mask=(m < count)[:, None], other=0.0)
        position = start + m
        high = start + tl.minimum(begin + BLOCK_M, count)
        low = 0
        if WINDOW:
            low = tl.maximum(start + begin - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        mass = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, D], tl.float32)
        for begin_n in range(low, high, BLOCK_N):
            place = begin_n + n
            page = tl.load(pages_ptr + b * page_stride + place // S, mask=place < high, other=0).to(tl.int64)
            row = ((page * S + place % S) * H + head // (HQ // H)) * D
            k = tl.load(k_ptr + row[:, None] + d, mask=(place < high)[:, None], other=0.0)
            seen = place[None, :] <= position[:, None]
            if WINDOW:
                seen = seen & (place[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, tl.dot(q, k.T, input_precision=PRECISION) * scale, float("-inf"))
            larger = tl.maximum(top, tl.max(scores, 1))
            shift = tl.where(larger == float("-inf"), 0.0, larger)
            weight = tl.exp2(scores - shift[:, None])
            fade = tl.exp2(top - shift)
            mass = mass * fade + tl.sum(weight, 1)
            v = tl.load(v_ptr + row[:, None] + d, mask=(place < high)[:, None], other=0.0)
            acc = acc * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
            top = larger
        acc = acc / mass[:, None]
        tl.store(out_ptr + query_rows[:, None] + d, acc.to(out_ptr.dtype.element_ty), mask=(m < count)[:, None])
