"""4-bit weights on a GPU: 16-bit activations (w4a16) or 8-bit ones (w4a8), one weight or a weight per expert.

A group of 128 codes lies in 64 bytes, its first half in the low nibbles. A step of the loop loads such bytes, turns
both halves into the tensor cores' type in registers and multiplies each with its half of the activations.

w4a16: code·s is rounded to the activations' type, as the reference does; only the order of float32 sums differs.
w4a8, int8: a group's sum is exact; the groups' sums, times their scales, are added in float32.
w4a8, e4m3: the same, but the tensor cores add a group's products with fewer bits than float32 has.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from lockstep.quant.kernels.triton_configs import FILL, MANY_ROWS, tile_for
from lockstep.quant.kernels.triton_tiles import (
    GROUP,
    INTERPRETED,
    Plan,
    finish,
    locate,
    make_plan,
)

STEP, HALF = tl.constexpr(GROUP), tl.constexpr(GROUP // 2)
DECODED_ROWS = tl.constexpr(64)
# Outputs: two low codes, two high ones. Inputs: two bytes; each scale below twice, once for each byte.
_TO_BFLOAT16 = tl.constexpr("""{
    .reg .b32 word, bits;
    .reg .f32 low0, low1, high0, high1;
    cvt.u32.u16 word, $2;
    lop3.b32 bits, word, 0x000F, 0x4B000000, 0xEA;
    mov.b32 low0, bits;
    lop3.b32 bits, word, 0x00F0, 0x4B000000, 0xEA;
    mov.b32 high0, bits;
    lop3.b32 bits, word, 0x0F00, 0x4B000000, 0xEA;
    mov.b32 low1, bits;
    lop3.b32 bits, word, 0xF000, 0x4B000000, 0xEA;
    mov.b32 high1, bits;
    sub.f32 low0, low0, 0f4B000008;
    sub.f32 high0, high0, 0f4B000080;
    sub.f32 low1, low1, 0f4B000800;
    sub.f32 high1, high1, 0f4B008000;
    mul.f32 low0, low0, $3;
    mul.f32 high0, high0, $5;
    mul.f32 low1, low1, $8;
    mul.f32 high1, high1, $10;
    cvt.rn.bf16x2.f32 $0, low1, low0;
    cvt.rn.bf16x2.f32 $1, high1, high0;
}""")
_TO_FLOAT16 = tl.constexpr(_TO_BFLOAT16.value.replace("bf16x2", "f16x2"))


def w4a16_matmul(x: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """bfloat16 or float16 [M, K], uint8 [N, K/2], scales [N, K/128], rounded up, to [M, N].

    Many rows are worth writing the weight out for: the same weights, but the library adds in an order of its own.
    """
    if len(x) > MANY_ROWS and dtype == x.dtype:
        return F.linear(x, dequantize_int4(packed, scales, x.shape[1], dtype))
    return four_bit(x, None, None, packed, scales, dtype)


def w4a8_matmul(xq: Tensor, sx: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 [M, K] with scales [M]; the weight as in w4a16_matmul."""
    return four_bit(xq, sx, None, packed, scales, dtype)


def w4a8_fp8_matmul(xq: Tensor, sx: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """As w4a8_matmul, over e4m3 rows."""
    return four_bit(xq, sx, None, packed, scales, dtype)


def grouped_w4a16_matmul(x: Tensor, offsets: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows offsets[e] to offsets[e + 1] times packed[e] of [E, N, K/2]; scales [E, N, K/128]."""
    return four_bit(x, None, offsets, packed, scales, dtype)


def grouped_w4a8_matmul(
    xq: Tensor, sx: Tensor, offsets: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """As grouped_w4a16_matmul, over int8 rows with scales [M]."""
    return four_bit(xq, sx, offsets, packed, scales, dtype)


def grouped_w4a8_fp8_matmul(
    xq: Tensor, sx: Tensor, offsets: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """As grouped_w4a8_matmul, over e4m3 rows."""
    return four_bit(xq, sx, offsets, packed, scales, dtype)


def dequantize_int4(packed: Tensor, scales: Tensor, K: int, dtype: torch.dtype) -> Tensor:
    """uint8 [..., N, K/2] and scales [..., N, K/128], rounded up, to bfloat16 or float16 [..., N, K]."""
    packed, scales = packed.contiguous(), scales.contiguous()
    weight = torch.empty(*packed.shape[:-1], K, dtype=dtype, device=packed.device)
    N = scales.numel() // scales.shape[-1]
    grid = triton.cdiv(N, DECODED_ROWS.value), scales.shape[-1]
    _decode[grid](packed, scales, weight, N, K, packed.shape[-1], EVEN=K % GROUP == 0, ASSEMBLY=not INTERPRETED)
    return weight


def four_bit(
    x: Tensor, sx: Tensor | None, offsets: Tensor | None, packed: Tensor, scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """All of the above: the type of `x` names the arithmetic."""
    (M, K), N, experts, kind = x.shape, packed.shape[-2], 0 if offsets is None else len(packed), _KINDS[x.dtype]
    plan = make_plan(tile_for(kind, M, experts), FILL[kind], M, N, K, experts)
    return run(plan, x, sx, offsets, packed, scales, dtype)


_KINDS = {torch.bfloat16: "w4a16", torch.float16: "w4a16", torch.int8: "w4a8", torch.float8_e4m3fn: "w4a8_fp8"}


def run(
    plan: Plan, x: Tensor, sx: Tensor | None, offsets: Tensor | None, packed: Tensor, scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """With the given plan, whatever the table says."""
    (M, K), N = x.shape, packed.shape[-2]
    x, packed, scales = x.contiguous(), packed.contiguous(), scales.contiguous()
    y = torch.empty(M, N, dtype=dtype, device=x.device)
    partials, counters = plan.meeting_place(torch.float32, x.device)
    if M:
        _four_bit[plan.grid](
            x, sx, packed, scales, y, offsets, partials, counters, M, N, K, packed.shape[-1], plan.experts,
            plan.chunks, plan.chunk, ASSEMBLY=not INTERPRETED, **plan.constants,
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["M", "experts", "chunks"])
def _four_bit(
    x, sx, w, sw, y, offsets, partials, counters, M, N, K, row_bytes, experts, chunks, chunk,
    ASSEMBLY: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUPS: tl.constexpr,
    STAGES: tl.constexpr, PARALLEL: tl.constexpr, IN_TURN: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    expert, first, end = locate(offsets, M, experts, BM, EXPERTS)
    if first >= end:
        return
    rows = first + tl.arange(0, BM)
    outputs = tl.program_id(1) * BN + tl.arange(0, BN)
    # Out of range: any valid row or output will do, its result is not written.
    x_rows = x + tl.minimum(rows, end - 1).to(tl.int64) * K
    w_rows = w + (expert * N + outputs % N) * row_bytes
    sw_rows = sw + (expert * N + outputs % N) * tl.cdiv(K, STEP)
    if IN_TURN:
        acc = tl.zeros((BN, BM), tl.float32)
        for start in range(0, K, chunk):
            stop = tl.minimum(start + chunk, K)
            acc += _sum_chunk(x_rows, w_rows, sw_rows, start, stop, K, BM, BN, GROUPS, STAGES, EVEN, ASSEMBLY)
    else:
        start = tl.program_id(2) * chunk
        stop = tl.minimum(start + chunk, K)
        acc = _sum_chunk(x_rows, w_rows, sw_rows, start, stop, K, BM, BN, GROUPS, STAGES, EVEN, ASSEMBLY)
    SCALED: tl.constexpr = "rows" if x.dtype.element_ty.primitive_bitwidth == 8 else "none"
    finish(acc, y, sx, sx, rows, end, outputs, N, partials, counters, chunks, BM, BN, PARALLEL, SCALED)


@triton.jit
def _sum_chunk(
    x, w, sw, start, stop, K,
    BM: tl.constexpr, BN: tl.constexpr, GROUPS: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """The sum over K from start to stop, [BN, BM], group by group."""
    acc = tl.zeros((BN, BM), tl.float32)
    for k in tl.range(start, stop, STEP * GROUPS, num_stages=STAGES):
        for group in tl.static_range(GROUPS):
            acc = _add_group(acc, x, w, sw, k + group * STEP, K, EVEN, ASSEMBLY)
    return acc


@triton.jit
def _add_group(acc, x, w, sw, k, K, EVEN: tl.constexpr, ASSEMBLY: tl.constexpr):
    """acc [BN, BM] plus the product over one group of K."""
    place = tl.arange(0, HALF)
    ks = place + k
    if EVEN:
        codes = tl.load(w[:, None] + (place + k // 2)[None, :])
        x_low = tl.load(x[None, :] + ks[:, None])
        x_high = tl.load(x[None, :] + ks[:, None] + HALF)
    else:
        half = tl.minimum(HALF, (K - k + 1) // 2)
        codes = tl.load(w[:, None] + (place + k // 2)[None, :], (place < half)[None, :], 0)
        x_low = tl.load(x[None, :] + ks[:, None], (place < half)[:, None], 0.0)
        x_high = tl.load(x[None, :] + ks[:, None] + half, ((place < half) & (ks + half < K))[:, None], 0.0)
    return _multiply(acc, codes, tl.load(sw + k // STEP)[:, None], x_low, x_high, ASSEMBLY)


@triton.jit
def _multiply(acc, codes, scale, x_low, x_high, ASSEMBLY: tl.constexpr):
    """acc plus a group's product, in the arithmetic that the activations' type names."""
    dtype: tl.constexpr = x_low.dtype
    if dtype == tl.int8:
        low, high = _to_int8(codes, ASSEMBLY)
        part = tl.dot(low, x_low, out_dtype=tl.int32)
        part = tl.dot(high, x_high, part, out_dtype=tl.int32)
        acc += part.to(tl.float32) * (scale * 0.0625)
    elif dtype == tl.float8e4nv:
        low, high = _to_e4m3(codes, ASSEMBLY)
        part = tl.dot(low, x_low)
        part = tl.dot(high, x_high, part)
        acc += part * (scale * 512.0)
    else:
        low, high = _dequantize(codes, scale, dtype, ASSEMBLY)
        acc = tl.dot(low, x_low, acc)
        acc = tl.dot(high, x_high, acc)
    return acc


@triton.jit
def _dequantize(codes, scale, dtype: tl.constexpr, ASSEMBLY: tl.constexpr):
    """code·scale of both halves: a float32 product, rounded to `dtype`.

    In assembly two bytes at a time: a nibble that is n at bit b, put under the exponent of 2^23, is the float
    2^23 + n·2^b. That saves shifts and conversions; 2^-b goes into the scale.
    """
    if ASSEMBLY:
        assembly: tl.constexpr = _TO_BFLOAT16 if dtype == tl.bfloat16 else _TO_FLOAT16
        low, high = tl.inline_asm_elementwise(
            assembly, "=r,=r,h,f,f,f,f,f,f,f,f",
            [codes, scale, scale * 0.0625, scale * 0.00390625, scale * 0.000244140625],
            dtype=(tl.int16, tl.int16), is_pure=True, pack=2,
        )  # fmt: skip
        low, high = low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)
    else:
        low = (((codes & 0x0F).to(tl.float32) - 8.0) * scale).to(dtype)
        high = (((codes >> 4).to(tl.float32) - 8.0) * scale).to(dtype)
    return low, high


@triton.jit
def _to_int8(codes, ASSEMBLY: tl.constexpr):
    """16·code of both halves: a nibble at the top of a byte with its first bit flipped. Four at a time."""
    if ASSEMBLY:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 shifted;
            shl.b32 shifted, $2, 4;
            lop3.b32 $0, shifted, 0xF0F0F0F0, 0x80808080, 0x6A;
            lop3.b32 $1, $2, 0xF0F0F0F0, 0x80808080, 0x6A;
            }""",
            "=&r,=&r,r", [codes], dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low, high = ((codes << 4) ^ 0x80).to(tl.int8, bitcast=True), ((codes & 0xF0) ^ 0x80).to(tl.int8, bitcast=True)
    return low, high


@triton.jit
def _to_e4m3(codes, ASSEMBLY: tl.constexpr):
    """code/512 of both halves: the bits of e4m3's smallest numbers are their magnitude, under a sign bit."""
    if ASSEMBLY:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 nibbles, negative, magnitude;
            and.b32 nibbles, $2, 0x0F0F0F0F;
            not.b32 negative, nibbles;
            shr.u32 negative, negative, 3;
            and.b32 negative, negative, 0x01010101;
            mad.lo.u32 magnitude, negative, 7, 0;
            xor.b32 magnitude, magnitude, nibbles;
            and.b32 magnitude, magnitude, 0x07070707;
            add.u32 magnitude, magnitude, negative;
            mad.lo.u32 $0, negative, 128, magnitude;
            shr.u32 nibbles, $2, 4;
            and.b32 nibbles, nibbles, 0x0F0F0F0F;
            not.b32 negative, nibbles;
            shr.u32 negative, negative, 3;
            and.b32 negative, negative, 0x01010101;
            mad.lo.u32 magnitude, negative, 7, 0;
            xor.b32 magnitude, magnitude, nibbles;
            and.b32 magnitude, magnitude, 0x07070707;
            add.u32 magnitude, magnitude, negative;
            mad.lo.u32 $1, negative, 128, magnitude;
            }""",
            "=&r,=&r,r", [codes], dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
        return low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)
    return _small_e4m3(codes & 0x0F), _small_e4m3(codes >> 4)


@triton.jit
def _small_e4m3(nibble):
    negative = nibble < 8
    magnitude = tl.where(negative, 8 - nibble, nibble - 8)
    return (magnitude | tl.where(negative, 0x80, 0)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _decode(packed, scales, weight, N, K, row_bytes, EVEN: tl.constexpr, ASSEMBLY: tl.constexpr):
    """One group of K of some rows."""
    rows = tl.program_id(0).to(tl.int64) * DECODED_ROWS + tl.arange(0, DECODED_ROWS)
    group = tl.program_id(1)
    place = tl.arange(0, HALF)[None, :]
    half = HALF if EVEN else tl.minimum(HALF, (K - group * STEP + 1) // 2)
    inside = (rows < N)[:, None]  # the same along K where it can be, so that accesses are wide
    if not EVEN:
        inside = inside & (place < half)
    codes = tl.load(packed + rows[:, None] * row_bytes + group * HALF + place, inside, 0)
    scale = tl.load(scales + rows * tl.cdiv(K, STEP) + group, rows < N, 0.0)[:, None]
    low, high = _dequantize(codes, scale, weight.dtype.element_ty, ASSEMBLY)
    start = weight + rows[:, None] * K + group * STEP + place
    tl.store(start, low, inside)
    tl.store(start + half, high, inside if EVEN else inside & (group * STEP + place + half < K))
