"""4-bit weights on a GPU: 16-bit activations (w4a16) or 8-bit ones (w4a8), one weight or a weight per expert.

A group of 128 codes lies in 64 bytes, its first half in the low nibbles. A step of the loop loads such bytes, turns
both halves into the tensor cores' type in registers and multiplies them with the activations. Tiles are
[outputs, rows], so that the tensor cores take decoded weights from registers.

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

from lockstep.quant.kernels.triton_configs import LIBRARY_ABOVE, many_tile, max_chunks, tile_for, wide_tiles
from lockstep.quant.kernels.triton_decode import OPERANDS, SHRUNK, TO_BOTH, TO_E4M3, TO_INT8
from lockstep.quant.kernels.triton_tiles import (
    DEPENDENT,
    GROUP,
    INTERPRETED,
    Plan,
    await_inputs,
    chunk_of,
    finish,
    locate,
    make_plan,
)
from lockstep.quant.kernels.triton_weights import dequantize_int4

STEP, HALF = tl.constexpr(GROUP), tl.constexpr(GROUP // 2)
SMALLEST_CHUNK = 1024  # of K: unpacking keeps more programs busy than loading does


def w4a16_matmul(x: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """bfloat16 or float16 [M, K], uint8 [N, K/2], scales [N, K/128], rounded up, to [M, N].

    Many rows are worth writing the weight out for: the same weights, but the library adds in an order of its own.
    """
    if len(x) > LIBRARY_ABOVE["w4a16"] and dtype == x.dtype:
        return F.linear(x, dequantize_int4(packed, scales, x.shape[1], dtype))
    tiles = wide_tiles(len(x))
    if tiles and x.dtype == torch.bfloat16 and x.shape[1] % GROUP == 0:
        from lockstep.quant.kernels import gluon_four  # Gluon is experimental: nobody else depends on it

        return gluon_four.w4a16_matmul(x, packed, scales, dtype, tiles)
    return four_bit(x, None, None, packed, scales, dtype)


def w4a8_matmul(xq: Tensor, sx: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 [M, K] with scales [M]; the weight as in w4a16_matmul."""
    (M, K), tile = xq.shape, many_tile("w4a8", len(xq))
    if tile and K % GROUP == 0:
        from lockstep.quant.kernels import gluon_many

        return gluon_many.w4a8_matmul(xq, sx, packed, scales, dtype, chunk_of(K, _chunks("w4a8", M, K)), tile)
    return four_bit(xq, sx, None, packed, scales, dtype)


def w4a8_fp8_matmul(xq: Tensor, sx: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """As w4a8_matmul, over e4m3 rows."""
    return w4a8_matmul(xq, sx, packed, scales, dtype)


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
    plan = make_plan(tile_for(kind, M, experts), _chunks(kind, M, K), M, N, K, experts)
    return run(plan, x, sx, offsets, packed, scales, dtype)


def _chunks(kind: str, M: int, K: int) -> int:
    return min(max_chunks(kind, M), K // SMALLEST_CHUNK)


_KINDS = {torch.bfloat16: "w4a16", torch.float16: "w4a16", torch.int8: "w4a8", torch.float8_e4m3fn: "w4a8_fp8"}


def run(
    plan: Plan, x: Tensor, sx: Tensor | None, offsets: Tensor | None, packed: Tensor, scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """With the given plan, whatever the table says."""
    (M, K), N = x.shape, packed.shape[-2]
    assert scales.ndim == 2 or scales.stride(0) == scales[0].numel(), "experts lie one after the other"
    assert sx is None or plan.tile.groups == 1, "a group's sum of 8-bit products has a scale of its own"
    x, packed = x.contiguous(), packed.contiguous()
    y = torch.empty(M, N, dtype=dtype, device=x.device)
    partials, counters = plan.meeting_place(torch.float32, x.device)
    early = DEPENDENT and sx is None  # beside a kernel that encodes rows it takes longer
    if M:
        _four_bit[plan.grid](
            x, sx, packed, scales, y, offsets, partials, counters, M, N, K, packed.shape[-1], plan.experts,
            plan.chunks, plan.chunk // GROUP, *scales.stride()[-2:],
            ASSEMBLY=not INTERPRETED, GROUPS=plan.tile.groups, DEPENDENT=early, launch_pdl=early, **plan.constants,
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["M", "experts", "chunks", "chunk_groups"])
def _four_bit(
    x, sx, w, sw, y, offsets, partials, counters, M, N, K, row_bytes, experts, chunks, chunk_groups, scale_n, scale_k,
    ASSEMBLY: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, PARALLEL: tl.constexpr, IN_TURN: tl.constexpr, EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    await_inputs(DEPENDENT)
    expert, first, end = locate(offsets, M, experts, BM, EXPERTS)
    if first >= end:
        return
    rows = first + tl.arange(0, BM)
    outputs = tl.program_id(1) * BN + tl.arange(0, BN)
    # Out of range: a row of zeros, another output's weight; what comes of them is not written. Reading a valid row in
    # place of the zeros takes time, for all programs then ask the L2 cache for the same few lines.
    x_rows = x + rows.to(tl.int64) * K
    w_rows = w + (expert * N + outputs % N) * row_bytes
    sw_rows = sw + expert * N * tl.cdiv(K, STEP) + (outputs % N) * scale_n
    chunk = chunk_groups * STEP
    start = 0 if IN_TURN else tl.program_id(2) * chunk
    stop = K if IN_TURN else tl.minimum(start + chunk, K)
    acc = tl.zeros((BN, BM), tl.float32)
    total = tl.zeros((BN, BM), tl.float32)  # in turn: of the chunks before this one
    for k in tl.range(start, stop, GROUPS * STEP, num_stages=STAGES):
        acc = _add_step(acc, x_rows, rows < end, w_rows, sw_rows, scale_k, k, K, GROUPS, EVEN, ASSEMBLY)
        # One loop over all chunks: loads for the next one are under way when this one ends.
        if IN_TURN:  # noqa: SIM102
            if (k + GROUPS * STEP) % chunk == 0:
                total += acc
                acc = tl.zeros_like(acc)
    if IN_TURN:
        acc += total
    if ASSEMBLY and x.dtype.element_ty == tl.bfloat16:
        acc *= 2.0**SHRUNK
    SCALED: tl.constexpr = "rows" if x.dtype.element_ty.primitive_bitwidth == 8 else "none"
    finish(acc, y, sx, sx, rows, end, outputs, N, partials, counters, chunks, BM, BN, PARALLEL, SCALED)


@triton.jit
def _add_step(acc, x, inside, w, sw, scale_k, k, K, GROUPS: tl.constexpr, EVEN: tl.constexpr, ASSEMBLY: tl.constexpr):
    """acc plus the product over some groups of K."""
    place, group = tl.arange(0, GROUPS * STEP), tl.arange(0, GROUPS)
    scales = tl.load(sw[:, None] + ((group + k // STEP) * scale_k)[None, :])
    WIDE: tl.constexpr = x.dtype.element_ty.primitive_bitwidth == 16
    if EVEN:
        codes = _load_pairs(w, k, GROUPS) if WIDE else tl.load(w[:, None] + (tl.arange(0, HALF) + k // 2)[None, :])
        x_step = tl.load(x[None, :] + (place + k)[:, None], inside[None, :], 0.0)
    else:
        half = tl.minimum(HALF, (K - k + 1) // 2)  # one group, which may be the last and shorter
        codes = _load_ragged_pairs(w, k, half) if WIDE else _load_ragged(w, tl.arange(0, HALF), k, half)
        ks = k + tl.where(place < HALF, place, place - HALF + half)
        mask = ((place % HALF < half) & (ks < K))[:, None] & inside[None, :]
        x_step = tl.load(x[None, :] + ks[:, None], mask, 0.0)
    return _multiply(acc, codes, scales, x_step, ASSEMBLY)


@triton.jit
def _load_pairs(w, k, GROUPS: tl.constexpr):
    """Bytes two by two [BN, 32·GROUPS], as the tensor cores take 16-bit weights."""
    return tl.load(w.to(tl.pointer_type(tl.int16))[:, None] + (tl.arange(0, GROUPS * HALF // 2) + k // 4)[None, :])


@triton.jit
def _load_ragged_pairs(w, k, half):
    first = tl.arange(0, HALF // 2) * 2
    low, high = _load_ragged(w, first, k, half), _load_ragged(w, first + 1, k, half)
    return (low.to(tl.int16) | (high.to(tl.int16) << 8)).to(tl.int16)


@triton.jit
def _load_ragged(w, byte, k, half):
    return tl.load(w[:, None] + (byte + k // 2)[None, :], (byte < half)[None, :], 0)


@triton.jit
def _multiply(acc, codes, scales, x, ASSEMBLY: tl.constexpr):
    """acc [BN, BM] plus codes times x [128·groups, BM], in the arithmetic that the type of x names.

    16-bit activations come with pairs of bytes [BN, 32·groups]; 8-bit ones with single bytes [BN, 64] and one group,
    whose sum is multiplied by its scale.
    """
    if x.dtype == tl.int8:
        low, high = _to_int8(codes, ASSEMBLY)
        part = tl.dot(_in_order(low, high), x, out_dtype=tl.int32)
        acc = tl.fma(part.to(tl.float32), scales * 0.0625, acc)
    elif x.dtype == tl.float8e4nv:
        low, high = _to_e4m3(codes, ASSEMBLY)
        acc = tl.fma(tl.dot(_in_order(low, high), x), scales * 512.0, acc)
    else:
        pairs = tl.reshape(codes, (codes.shape[0], scales.shape[1], HALF // 2))
        low, high = _to_half(pairs, scales[:, :, None], x.dtype, ASSEMBLY)
        acc = tl.dot(_in_order(low, high), x, acc)
        if ASSEMBLY:
            acc = _awaited(acc)
    return acc


@triton.jit
def _in_order(low, high):
    """Halves of groups [BN, ..., 64] as [BN, K], in the order of K. Every thread keeps what it holds."""
    halves = tl.reshape(tl.join(low, high), (low.shape[0], low.numel // (low.shape[0] * HALF), HALF, 2))
    return tl.reshape(tl.permute(halves, (0, 1, 3, 2)), (low.shape[0], 2 * low.numel // low.shape[0]))


@triton.jit
def _awaited(acc):
    """acc, so that the compiler awaits the product that adds to it before the loop goes on.

    Of a product left under way ptxas awaits every single instruction ("wgmma.mma_async instructions are serialized"),
    for it does not see that nothing else touches the sums.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _to_half(pairs, scale, dtype: tl.constexpr, ASSEMBLY: tl.constexpr):
    """code·scale of both halves [BN, groups, 64]: exact in float32, then rounded to `dtype`. In assembly ·2^-SHRUNK.

    That takes 1.25 instructions a weight. A nibble n at bit 0 (4) of a bfloat16 that is otherwise 0 is n·2^-133
    (n·2^-129), so one multiplication and addition, which rounds once, gives (n - 8)·scale, for two weights at a time:
    scales are bfloat16 values, and so are eight times as much. float16 has too few exponents for that.
    """
    if ASSEMBLY and dtype == tl.bfloat16:
        a, b, c, d = tl.inline_asm_elementwise(
            TO_BOTH, "=h,=h,=h,=h,h,r,r,r",
            [pairs, _twice(scale * 2.0**100), _twice(scale * 2.0**96), _twice(scale * -(2.0**-30))],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        a, b = _nibble(pairs, 0, scale, dtype), _nibble(pairs, 8, scale, dtype)
        c, d = _nibble(pairs, 4, scale, dtype), _nibble(pairs, 12, scale, dtype)
    shape: tl.constexpr = (pairs.shape[0], pairs.shape[1], HALF)
    return tl.reshape(tl.join(a, b), shape), tl.reshape(tl.join(c, d), shape)


@triton.jit
def _nibble(pairs, bit: tl.constexpr, scale, dtype: tl.constexpr):
    return ((((pairs >> bit) & 0x0F).to(tl.float32) - 8.0) * scale).to(dtype)


@triton.jit
def _twice(value):
    """A float32 number that bfloat16 holds, in both halves of a register."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits & -65536) | ((bits >> 16) & 0xFFFF)


@triton.jit
def _to_int8(codes, ASSEMBLY: tl.constexpr):
    """16·code of both halves."""
    if ASSEMBLY:
        low, high = tl.inline_asm_elementwise(TO_INT8, OPERANDS, [codes], (tl.int8, tl.int8), is_pure=True, pack=4)
    else:
        low, high = ((codes << 4) ^ 0x80).to(tl.int8, bitcast=True), ((codes & 0xF0) ^ 0x80).to(tl.int8, bitcast=True)
    return low, high


@triton.jit
def _to_e4m3(codes, ASSEMBLY: tl.constexpr):
    """code/512 of both halves."""
    if ASSEMBLY:
        low, high = tl.inline_asm_elementwise(TO_E4M3, OPERANDS, [codes], (tl.int8, tl.int8), is_pure=True, pack=4)
        return low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)
    return _small_e4m3(codes & 0x0F), _small_e4m3(codes >> 4)


@triton.jit
def _small_e4m3(nibble):
    negative = nibble < 8
    magnitude = tl.where(negative, 8 - nibble, nibble - 8)
    return (magnitude | tl.where(negative, 0x80, 0)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
