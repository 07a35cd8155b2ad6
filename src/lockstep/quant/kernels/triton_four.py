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

from lockstep.quant.kernels.triton_configs import tile_for
from lockstep.quant.kernels.triton_tiles import (
    GROUP,
    INTERPRETED,
    Plan,
    await_inputs,
    finish,
    locate,
    make_plan,
    prefetch,
)

STEP, HALF = tl.constexpr(GROUP), tl.constexpr(GROUP // 2)


def w4a16_matmul(x: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """bfloat16 or float16 [M, K], uint8 [N, K/2], scales [N, K/128], rounded up, to [M, N]."""
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


def four_bit(
    x: Tensor, sx: Tensor | None, offsets: Tensor | None, packed: Tensor, scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """All of the above: the type of `x` names the arithmetic."""
    M, N, experts = len(x), packed.shape[-2], 0 if offsets is None else len(packed)
    tile = tile_for(_KINDS[x.dtype], M, experts)
    return run(make_plan(tile, M, N, x.shape[1], experts), x, sx, offsets, packed, scales, dtype)


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
            plan.chunks, plan.chunk, EVEN=K % GROUP == 0, ASSEMBLY=not INTERPRETED, **plan.constants,
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["M", "experts", "chunks"])
def _four_bit(
    x, sx, w, sw, y, offsets, partials, counters, M, N, K, row_bytes, experts, chunks, chunk,
    EVEN: tl.constexpr, ASSEMBLY: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PARALLEL: tl.constexpr,
    IN_TURN: tl.constexpr, EXPERTS: tl.constexpr, DEPENDENT: tl.constexpr, PREFETCH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.program_id(2) * chunk
    if PREFETCH and EVEN and EXPERTS == 0:
        first_byte = w + (outputs % N).to(tl.int64) * row_bytes + k // 2
        prefetch(first_byte, tl.minimum(chunk, K - k) // 2)
    await_inputs(DEPENDENT)
    expert, first, end = locate(offsets, M, experts, BM, EXPERTS)
    if first >= end:
        return
    rows = first + tl.arange(0, BM)
    # Out of range: any valid row or output will do, its result is not written.
    x += tl.minimum(rows, end - 1).to(tl.int64) * K
    w += (expert * N + outputs % N) * row_bytes
    sw += (expert * N + outputs % N) * tl.cdiv(K, STEP)
    if IN_TURN:
        acc = tl.zeros((BN, BM), tl.float32)
        for start in range(0, K, chunk):
            acc += _chunk(x, w, sw, start, tl.minimum(start + chunk, K), K, BM, BN, EVEN, ASSEMBLY, STAGES)
    else:
        acc = _chunk(x, w, sw, k, tl.minimum(k + chunk, K), K, BM, BN, EVEN, ASSEMBLY, STAGES)
    SCALED: tl.constexpr = "rows" if x.dtype.element_ty.primitive_bitwidth == 8 else "none"
    finish(acc, y, sx, sx, rows, end, outputs, N, partials, counters, chunks, BM, BN, PARALLEL, SCALED)


@triton.jit
def _chunk(
    x, w, sw, start, stop, K,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, ASSEMBLY: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sum over K from start to stop, [BN, BM], group by group."""
    acc = tl.zeros((BN, BM), tl.float32)
    place = tl.arange(0, HALF)
    for k in tl.range(start, stop, STEP, num_stages=STAGES):
        ks = k + place
        if EVEN:
            codes = tl.load(w[:, None] + (k // 2 + place)[None, :])
            x_low = tl.load(x[None, :] + ks[:, None])
            x_high = tl.load(x[None, :] + ks[:, None] + HALF)
        else:
            half = tl.minimum(HALF, (K - k + 1) // 2)
            codes = tl.load(w[:, None] + (k // 2 + place)[None, :], (place < half)[None, :], 0)
            x_low = tl.load(x[None, :] + ks[:, None], (place < half)[:, None], 0.0)
            x_high = tl.load(x[None, :] + ks[:, None] + half, ((place < half) & (ks + half < K))[:, None], 0.0)
        scale = tl.load(sw + k // STEP)[:, None]
        acc = _multiply(acc, codes, scale, x_low, x_high, ASSEMBLY)
    return acc


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
        low, high = _to_float(codes, ASSEMBLY)
        acc = tl.dot((low * scale).to(dtype), x_low, acc)
        acc = tl.dot((high * (scale * 0.0625)).to(dtype), x_high, acc)
    return acc


@triton.jit
def _to_float(codes, ASSEMBLY: tl.constexpr):
    """float32: code from the low nibbles, 16·code from the high ones.

    A byte b put under the exponent of 2^23 is the float 2^23 + b: cheaper than a conversion.
    """
    if ASSEMBLY:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 word, low, high;
            cvt.u32.u16 word, $4;
            and.b32 low, word, 0x0F0F;
            and.b32 high, word, 0xF0F0;
            prmt.b32 $0, low, 0x4B000000, 0x7440;
            prmt.b32 $1, low, 0x4B000000, 0x7441;
            prmt.b32 $2, high, 0x4B000000, 0x7440;
            prmt.b32 $3, high, 0x4B000000, 0x7441;
            }""",
            "=r,=r,=r,=r,h", [codes], dtype=(tl.int32, tl.int32), is_pure=True, pack=2,
        )  # fmt: skip
        low, high = low.to(tl.float32, bitcast=True) - 8388616.0, high.to(tl.float32, bitcast=True) - 8388736.0
    else:
        low, high = (codes & 0x0F).to(tl.float32) - 8.0, (codes & 0xF0).to(tl.float32) - 128.0
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
