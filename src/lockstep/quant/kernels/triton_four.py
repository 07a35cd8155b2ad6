"""4-bit weights on a GPU: 16-bit activations (w4a16) or 8-bit ones (w4a8), one weight or a weight per expert.

A group of 128 codes lies in 64 bytes, its first half in the low nibbles. A step of the loop loads such bytes, turns
both halves into the tensor cores' type in registers and multiplies each with its half of the activations. Tiles are
[outputs, rows], so that wide instructions take decoded weights from registers, or (ROWS_FIRST) [rows, outputs], so that
few rows run on narrow instructions, which fill the device with more programs.

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

from lockstep.quant.kernels.triton_configs import LIBRARY_ABOVE, tile_for
from lockstep.quant.kernels.triton_tiles import GROUP, INTERPRETED, Plan, finish, locate, make_plan
from lockstep.quant.kernels.triton_weights import dequantize_int4

STEP, HALF = tl.constexpr(GROUP), tl.constexpr(GROUP // 2)
MAX_CHUNKS, SMALLEST_CHUNK = 4, 1024  # unpacking keeps more programs busy than loading does


def _assembly(num_bytes: int) -> str:
    """As many low codes and high codes, times the scale, in bfloat16.

    Operands: the low ones and the high ones, two in a register; the bytes; then, once for each byte: the scale for
    nibbles at bits 0, 4, 8 and 12, and what their excess of 8 comes to.
    """
    n, pairs = num_bytes, num_bytes // 2
    scale = [[2 * pairs + 1 + place * n + byte for byte in range(n)] for place in range(5)]
    lines = [".reg .b32 word, bits;", f".reg .f32 low<{n}>, high<{n}>;"]
    for pair in range(pairs):
        lines += [f"cvt.u32.u16 word, ${2 * pairs};" if n == 2 else f"shr.u32 word, ${2 * pairs}, {16 * pair};"]
        for half, (byte, name) in enumerate((2 * pair + b, name) for b in (0, 1) for name in ("low", "high")):
            lines += [f"and.b32 bits, word, {15 << 4 * half};", f"mov.b32 {name}{byte}, bits;"]
            lines += [f"fma.rn.f32 {name}{byte}, {name}{byte}, ${scale[half][byte]}, ${scale[4][byte]};"]
    for out, (name, pair) in enumerate((name, pair) for name in ("low", "high") for pair in range(pairs)):
        lines += [f"cvt.rn.bf16x2.f32 ${out}, {name}{2 * pair + 1}, {name}{2 * pair};"]
    return "{" + "\n".join(lines) + "}"


_TWO_BYTES, _FOUR_BYTES = tl.constexpr(_assembly(2)), tl.constexpr(_assembly(4))
_TWO_OPERANDS, _FOUR_OPERANDS = tl.constexpr("=r,=r,h" + ",f" * 10), tl.constexpr("=r,=r,=r,=r,r" + ",f" * 20)
SHRUNK = tl.constexpr(38)  # log2 of how much smaller than they are the assembly decodes weights


def w4a16_matmul(x: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """bfloat16 or float16 [M, K], uint8 [N, K/2], scales [N, K/128], rounded up, to [M, N].

    Many rows are worth writing the weight out for: the same weights, but the library adds in an order of its own.
    """
    if len(x) > LIBRARY_ABOVE["w4a16"] and dtype == x.dtype:
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


def four_bit(
    x: Tensor, sx: Tensor | None, offsets: Tensor | None, packed: Tensor, scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """All of the above: the type of `x` names the arithmetic."""
    (M, K), N, experts, kind = x.shape, packed.shape[-2], 0 if offsets is None else len(packed), _KINDS[x.dtype]
    plan = make_plan(tile_for(kind, M, experts), min(MAX_CHUNKS, K // SMALLEST_CHUNK), M, N, K, experts)
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
            plan.chunks, plan.chunk // GROUP, ASSEMBLY=not INTERPRETED,
            ROWS_FIRST=plan.tile.rows_first, **plan.constants,
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["M", "experts", "chunks"])
def _four_bit(
    x, sx, w, sw, y, offsets, partials, counters, M, N, K, row_bytes, experts, chunks, chunk_groups,
    ASSEMBLY: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, PARALLEL: tl.constexpr, IN_TURN: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
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
    chunk = chunk_groups * STEP
    if IN_TURN:
        acc = tl.zeros((BN, BM), tl.float32)
        for start in range(0, K, chunk):
            stop = tl.minimum(start + chunk, K)
            acc += _sum_chunk(x_rows, w_rows, sw_rows, start, stop, K, BM, BN, STAGES, ROWS_FIRST, EVEN, ASSEMBLY)
    else:
        start = tl.program_id(2) * chunk
        stop = tl.minimum(start + chunk, K)
        acc = _sum_chunk(x_rows, w_rows, sw_rows, start, stop, K, BM, BN, STAGES, ROWS_FIRST, EVEN, ASSEMBLY)
    if ASSEMBLY and x.dtype.element_ty == tl.bfloat16:
        acc *= 2.0**SHRUNK
    SCALED: tl.constexpr = "rows" if x.dtype.element_ty.primitive_bitwidth == 8 else "none"
    finish(acc, y, sx, sx, rows, end, outputs, N, partials, counters, chunks, BM, BN, PARALLEL, SCALED)


@triton.jit
def _sum_chunk(
    x, w, sw, start, stop, K,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, ROWS_FIRST: tl.constexpr,
    EVEN: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """The sum over K from start to stop, [BN, BM], group by group."""
    acc = tl.zeros((BM, BN) if ROWS_FIRST else (BN, BM), tl.float32)
    for k in tl.range(start, stop, STEP, num_stages=STAGES):
        acc = _add_group(acc, x, w, sw, k, K, ROWS_FIRST, EVEN, ASSEMBLY)
    return tl.trans(acc) if ROWS_FIRST else acc


@triton.jit
def _add_group(acc, x, w, sw, k, K, ROWS_FIRST: tl.constexpr, EVEN: tl.constexpr, ASSEMBLY: tl.constexpr):
    """acc plus the product over one group of K."""
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
    return _multiply(acc, codes, tl.load(sw + k // STEP)[:, None], x_low, x_high, ROWS_FIRST, ASSEMBLY)


@triton.jit
def _multiply(acc, codes, scale, x_low, x_high, ROWS_FIRST: tl.constexpr, ASSEMBLY: tl.constexpr):
    """acc plus a group's product, in the arithmetic that the activations' type names."""
    dtype: tl.constexpr = x_low.dtype
    if dtype == tl.int8:
        low, high = _to_int8(codes, ASSEMBLY)
        part = _dot(low, x_low, None, tl.int32, ROWS_FIRST)
        part = _dot(high, x_high, part, tl.int32, ROWS_FIRST)
        acc += part.to(tl.float32) * _like(acc, scale * 0.0625, ROWS_FIRST)
    elif dtype == tl.float8e4nv:
        low, high = _to_e4m3(codes, ASSEMBLY)
        part = _dot(low, x_low, None, tl.float32, ROWS_FIRST)
        part = _dot(high, x_high, part, tl.float32, ROWS_FIRST)
        acc += part * _like(acc, scale * 512.0, ROWS_FIRST)
    else:
        low, high = _to_half(codes, scale, dtype, ROWS_FIRST, ASSEMBLY)
        acc = _dot(low, x_low, acc, tl.float32, ROWS_FIRST)
        acc = _dot(high, x_high, acc, tl.float32, ROWS_FIRST)
    return acc


@triton.jit
def _dot(w, x, acc, dtype: tl.constexpr, ROWS_FIRST: tl.constexpr):
    left = tl.trans(x) if ROWS_FIRST else w
    right = tl.trans(w) if ROWS_FIRST else x
    return tl.dot(left, right, acc, out_dtype=dtype)


@triton.jit
def _like(acc, scale, ROWS_FIRST: tl.constexpr):
    """A scale for each output [BN, 1], to be multiplied with acc."""
    return tl.trans(scale) if ROWS_FIRST else scale


@triton.jit
def _to_half(codes, scale, dtype: tl.constexpr, ROWS_FIRST: tl.constexpr, ASSEMBLY: tl.constexpr):
    """code·scale of both halves: a float32 product, rounded to `dtype`. In assembly times 2^-SHRUNK.

    That takes 2.6 instructions a weight. A nibble n at bit b of a word that is otherwise 0 is the float n·2^(b-149), so
    one multiplication and addition, which rounds once, gives (n - 8)·scale. Its exponent must fit bfloat16's range, not
    float16's. Wide instructions want codes two by two, narrow ones four by four.
    """
    if ASSEMBLY and dtype == tl.bfloat16:
        big = scale * 2.59614842926741381e33  # 2^111: for scales up to 2^16
        low, high = tl.inline_asm_elementwise(
            _FOUR_BYTES if ROWS_FIRST else _TWO_BYTES, _FOUR_OPERANDS if ROWS_FIRST else _TWO_OPERANDS,
            [codes, big, big * 0.0625, big * 0.00390625, big * 0.000244140625, scale * -2.91038304567337036e-11],
            dtype=(tl.int16, tl.int16), is_pure=True, pack=4 if ROWS_FIRST else 2,
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
