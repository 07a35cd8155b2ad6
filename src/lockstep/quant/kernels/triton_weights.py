"""Weights to codes and codes back to numbers on a GPU, in one pass over memory. Equal to the reference bit for bit.

A weight is quantized after every update, and decoded, like the inputs of a layer, in every backward pass. NaN and inf
reach the scales of what shares them.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.quant.kernels.triton_rows import absmax_of, fp8_codes, fp8_scale, nearest
from lockstep.quant.kernels.triton_tiles import cdiv

GROUP = tl.constexpr(128)
HALF = tl.constexpr(64)
INT4_MAX, INT4_MIN_SCALE = tl.constexpr(7.0), tl.constexpr(1e-5)
ROWS, WIDTH = tl.constexpr(16), tl.constexpr(512)  # of a tile to decode
INT4_ROWS = tl.constexpr(64)


def quantize_blocks_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., N, K] to e4m3 codes [..., N, K] and scales [..., ceil(N / 128), ceil(K / 128)]."""
    *lead, N, K = weight.shape
    weight = weight.contiguous()
    blocks = cdiv(N, GROUP.value), cdiv(K, GROUP.value)
    codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = torch.empty(*lead, *blocks, dtype=torch.float32, device=weight.device)
    experts = scales.numel() // (blocks[0] * blocks[1])
    _quantize_block[(experts * blocks[0], blocks[1])](weight, codes, scales, N, K, num_warps=8)
    return codes, scales


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., N, K] to packed codes [..., N, ceil(K / 2)] and scales [..., N, ceil(K / 128)], in memory by group."""
    *lead, N, K = weight.shape
    weight = weight.contiguous()
    packed = torch.empty(*lead, N, (K + 1) // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(*lead, cdiv(K, GROUP.value), N, dtype=torch.float32, device=weight.device).mT
    rows = weight.numel() // K
    grid = cdiv(rows, INT4_ROWS.value), scales.shape[-1]
    _quantize_int4[grid](weight, packed, scales, rows, N, K, packed.shape[-1], *scales.stride()[-2:])
    return packed, scales


def dequantize_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 or e4m3 [..., K] times scales [...]."""
    return _dequantize(codes, scales, dtype, rows_per_scale=1, width=codes.shape[-1])


def dequantize_groups(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., K] times scales [..., ceil(K / 128)]."""
    return _dequantize(codes, scales, dtype, rows_per_scale=1, width=GROUP.value)


def dequantize_blocks(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., N, K] times scales [..., ceil(N / 128), ceil(K / 128)]."""
    return _dequantize(codes, scales, dtype, rows_per_scale=GROUP.value, width=GROUP.value)


def dequantize_int4(packed: Tensor, scales: Tensor, K: int, dtype: torch.dtype) -> Tensor:
    """Packed codes [..., N, ceil(K / 2)] times scales [..., N, ceil(K / 128)], to [..., N, K]."""
    packed = packed.contiguous()
    assert scales.ndim == 2 or scales.stride(0) == scales[0].numel(), "experts lie one after the other"
    weight = torch.empty(*packed.shape[:-1], K, dtype=dtype, device=packed.device)
    rows, N = scales.numel() // scales.shape[-1], scales.shape[-2]
    grid = cdiv(rows, INT4_ROWS.value), scales.shape[-1]
    _dequantize_int4[grid](
        packed, scales, weight, rows, N, K, packed.shape[-1], *scales.stride()[-2:], EVEN=K % GROUP.value == 0
    )
    return weight


def _dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype, rows_per_scale: int, width: int) -> Tensor:
    codes, scales = codes.contiguous(), scales.contiguous()
    K = codes.shape[-1]
    rows = codes.numel() // K if K else 0
    values = torch.empty_like(codes, dtype=dtype)
    if rows:
        N = codes.shape[-2] if codes.ndim > 1 else 1
        grid = cdiv(rows, ROWS.value), cdiv(K, WIDTH.value)
        _dequantize_tile[grid](codes, scales, values, rows, N, K, width, ROWS_PER_SCALE=rows_per_scale)
    return values


@triton.jit
def _quantize_block(weight, codes, scales, N, K):
    down = tl.cdiv(N, GROUP)
    expert, block = (tl.program_id(0) // down).to(tl.int64), tl.program_id(0) % down
    n = block * GROUP + tl.arange(0, GROUP)
    k = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    inside = (n < N)[:, None] & (k < K)[None, :]
    place = (expert * N + n)[:, None] * K + k[None, :]
    value = tl.load(weight + place, inside, 0.0).to(tl.float32)
    scale = fp8_scale(tl.max(absmax_of(value, 1), 0).to(tl.float32, bitcast=True))
    tl.store(codes + place, fp8_codes(value, scale).to(codes.dtype.element_ty), inside)
    tl.store(scales + tl.program_id(0) * tl.cdiv(K, GROUP) + tl.program_id(1), scale)


@triton.jit
def _quantize_int4(weight, packed, scales, num_rows, N, K, row_bytes, scale_n, scale_k):
    """One group of K of some rows."""
    rows = tl.program_id(0).to(tl.int64) * INT4_ROWS + tl.arange(0, INT4_ROWS)
    group = tl.program_id(1)
    place = tl.arange(0, HALF)[None, :]
    half = tl.minimum(HALF, (K - group * GROUP + 1) // 2)
    k = group * GROUP + place
    first = (rows < num_rows)[:, None] & (place < half)
    low = tl.load(weight + rows[:, None] * K + k, first, 0.0).to(tl.float32)
    high = tl.load(weight + rows[:, None] * K + k + half, first & (k + half < K), 0.0).to(tl.float32)
    absmax = tl.maximum(absmax_of(low, 1), absmax_of(high, 1)).to(tl.float32, bitcast=True)
    scale = tl.div_rn(absmax, INT4_MAX)
    scale = tl.where(scale < INT4_MIN_SCALE, INT4_MIN_SCALE, scale).to(tl.bfloat16).to(tl.float32)  # keeps NaN
    codes = _nibble(low, scale[:, None]) | (_nibble(high, scale[:, None]) << 4)
    tl.store(packed + rows[:, None] * row_bytes + group * HALF + place, codes.to(tl.uint8), first)
    tl.store(_scale_at(scales, rows, group, N, K, scale_n, scale_k), scale, rows < num_rows)


@triton.jit
def _scale_at(scales, rows, group, N, K, scale_n, scale_k):
    """Where a group's scale is for rows of experts, one after the other."""
    return scales + rows // N * (N * tl.cdiv(K, GROUP)) + rows % N * scale_n + group * scale_k


@triton.jit
def _nibble(value, scale):
    code = nearest(tl.clamp(tl.div_rn(value, scale), -INT4_MAX, INT4_MAX))
    return (code + 8.0).to(tl.int32)


@triton.jit
def _dequantize_tile(codes, scales, values, rows, N, K, width, ROWS_PER_SCALE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (k < K)[None, :]
    scale_row = row
    if ROWS_PER_SCALE > 1:
        scale_row = row // N * tl.cdiv(N, ROWS_PER_SCALE) + row % N // ROWS_PER_SCALE
    scale = tl.load(scales + (scale_row * tl.cdiv(K, width))[:, None] + (k // width)[None, :], inside, 0.0)
    place = row[:, None] * K + k[None, :]
    code = tl.load(codes + place, inside, 0.0).to(tl.float32)
    tl.store(values + place, (code * scale).to(values.dtype.element_ty), inside)


@triton.jit
def _dequantize_int4(packed, scales, weight, num_rows, N, K, row_bytes, scale_n, scale_k, EVEN: tl.constexpr):
    """One group of K of some rows."""
    rows = tl.program_id(0).to(tl.int64) * INT4_ROWS + tl.arange(0, INT4_ROWS)
    group = tl.program_id(1)
    place = tl.arange(0, HALF)[None, :]
    half = HALF if EVEN else tl.minimum(HALF, (K - group * GROUP + 1) // 2)
    inside = (rows < num_rows)[:, None]  # the same along K where it can be, so that accesses are wide
    if not EVEN:
        inside = inside & (place < half)
    codes = tl.load(packed + rows[:, None] * row_bytes + group * HALF + place, inside, 0)
    scale = tl.load(_scale_at(scales, rows, group, N, K, scale_n, scale_k), rows < num_rows, 0.0)[:, None]
    low = ((codes & 0x0F).to(tl.float32) - 8.0) * scale
    high = ((codes >> 4).to(tl.float32) - 8.0) * scale
    start = weight + rows[:, None] * K + group * GROUP + place
    tl.store(start, low.to(weight.dtype.element_ty), inside)
    tl.store(
        start + half, high.to(weight.dtype.element_ty), inside if EVEN else inside & (group * GROUP + place + half < K)
    )
