"""8-bit weights times 8-bit activations on a GPU: int8 and e4m3, one weight or a weight per expert.

int8: the integer sums are exact, so results equal the reference bit for bit. e4m3: the tensor cores add up to 128
products with fewer bits than float32 has; such sums are then added in float32.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.quant.kernels import cuda
from lockstep.quant.kernels.triton_configs import HALVES, LIBRARY_ABOVE, many_tile, tile_for
from lockstep.quant.kernels.triton_tiles import (
    DEPENDENT,
    GROUP,
    MULTIPROCESSORS,
    WARP_GROUPS,
    Plan,
    Tile,
    await_inputs,
    chunk_of,
    fetch_ahead,
    finish,
    let_next_start,
    locate,
    make_plan,
)

STEP = tl.constexpr(GROUP)
WGMMA_ROWS = 64  # of the first matrix in a product that a group of four warps computes
SMALLEST_CHUNK = 6144  # of K: shorter ones cost more where their sums meet than they gain


def int8_matmul(xq: Tensor, sx: Tensor, wq: Tensor, sw: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 [M, K] and [N, K], scales [M] and [N], to [M, N]."""
    return eight_bit("int8", xq, sx, None, wq, sw, dtype)


def fp8_matmul(xq: Tensor, sx: Tensor, wq: Tensor, sw: Tensor, dtype: torch.dtype) -> Tensor:
    """e4m3 [M, K] and [N, K], scales [M] and [N], to [M, N]. For many rows the library, which adds in its own order."""
    if len(xq) > LIBRARY_ABOVE["fp8"] and dtype == torch.bfloat16 and len(wq) % 16 == 0 and xq.shape[1] % 16 == 0:
        return cuda.fp8_matmul(xq, sx, wq, sw, dtype)
    return eight_bit("fp8", xq, sx, None, wq, sw, dtype)


def fp8_block_matmul(xq: Tensor, sx: Tensor, wq: Tensor, sw: Tensor, dtype: torch.dtype) -> Tensor:
    """e4m3 [M, K] and [N, K], scales [M, K/128] and [N/128, K/128] rounded up, to [M, N]."""
    K, tile = xq.shape[1], many_tile("fp8_block", len(xq))
    if tile and K % 16 == 0:
        from lockstep.quant.kernels import gluon_many  # Gluon is experimental: nobody else depends on it

        return gluon_many.fp8_block_matmul(xq, sx, wq, sw, dtype, chunk_of(K, K // SMALLEST_CHUNK), tile)
    return eight_bit("fp8_block", xq, sx, None, wq, sw, dtype)


def grouped_int8_matmul(xq: Tensor, sx: Tensor, offsets: Tensor, wq: Tensor, sw: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows offsets[e] to offsets[e + 1] times wq[e] of [E, N, K]; sw [E, N]."""
    return eight_bit("int8", xq, sx, offsets, wq, sw, dtype)


def grouped_fp8_matmul(xq: Tensor, sx: Tensor, offsets: Tensor, wq: Tensor, sw: Tensor, dtype: torch.dtype) -> Tensor:
    """As grouped_int8_matmul, over e4m3."""
    return eight_bit("fp8", xq, sx, offsets, wq, sw, dtype)


def grouped_fp8_block_matmul(
    xq: Tensor, sx: Tensor, offsets: Tensor, wq: Tensor, sw: Tensor, dtype: torch.dtype
) -> Tensor:
    """As grouped_fp8_matmul, with scales [M, K/128] and [E, N/128, K/128] rounded up."""
    return eight_bit("fp8_block", xq, sx, offsets, wq, sw, dtype)


def eight_bit(
    kind: str, xq: Tensor, sx: Tensor, offsets: Tensor | None, wq: Tensor, sw: Tensor, dtype: torch.dtype
) -> Tensor:
    """All of the above: `kind` is int8, fp8 or fp8_block."""
    (M, K), N, experts = xq.shape, wq.shape[-2], 0 if offsets is None else len(wq)
    return run(plan_for(kind, M, N, K, experts), kind, xq, sx, offsets, wq, sw, dtype)


def plan_for(kind: str, M: int, N: int, K: int, experts: int = 0) -> Plan:
    """By the table; in tiles of half the rows where whole ones leave half of the device idle."""

    def plan(tile: Tile) -> Plan:
        return make_plan(tile, K // SMALLEST_CHUNK, M, N, K, experts, exact=kind == "int8")

    whole = plan(tile_for(kind, M, experts))
    halves = HALVES.get(whole.tile.rows) if WARP_GROUPS and not experts else None
    return plan(halves) if halves and 2 * whole.programs <= MULTIPROCESSORS else whole


def run(
    plan: Plan, kind: str, xq: Tensor, sx: Tensor, offsets: Tensor | None, wq: Tensor, sw: Tensor, dtype: torch.dtype
) -> Tensor:
    """With the given plan, whatever the table says."""
    blocks = kind == "fp8_block"
    assert not blocks or plan.tile.outputs <= GROUP, "a tile has one row of block scales"
    (M, K), N = xq.shape, wq.shape[-2]
    xq, wq, sx, sw = xq.contiguous(), wq.contiguous(), sx.contiguous(), sw.contiguous()
    y = torch.empty(M, N, dtype=dtype, device=xq.device)
    partials, counters = plan.meeting_place(torch.int32 if kind == "int8" else torch.float32, xq.device)
    if M:
        _eight_bit[plan.grid](
            xq, sx, wq, sw, y, offsets, partials, counters, M, N, K, plan.experts, plan.chunks, plan.chunk // GROUP,
            plan.ahead, BLOCK_SCALED=blocks, ROWS_FIRST=blocks and WARP_GROUPS and plan.tile.rows >= WGMMA_ROWS,
            DEPENDENT=DEPENDENT, launch_pdl=DEPENDENT, **plan.constants,
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["M", "experts", "chunks", "ahead"])
def _eight_bit(
    x, sx, w, sw, y, offsets, partials, counters, M, N, K, experts, chunks, chunk_groups, ahead,
    BLOCK_SCALED: tl.constexpr, ROWS_FIRST: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, PARALLEL: tl.constexpr, IN_TURN: tl.constexpr, EXPERTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(1) * BN + tl.arange(0, BN)
    chunk = chunk_groups * STEP
    if DEPENDENT and EXPERTS == 0:  # which expert's weights are read is an input, too
        start = tl.program_id(2) * chunk
        fetch_ahead(w + (outputs % N).to(tl.int64) * K + start, tl.minimum(ahead, K - start))
    await_inputs(DEPENDENT)
    expert, first, end = locate(offsets, M, experts, BM, EXPERTS)
    if first >= end:
        return
    rows = first + tl.arange(0, BM)
    # Out of range: a row of zeros, another output's weight; what comes of them is not written. Reading a valid row in
    # place of the zeros takes time, for all programs then ask the L2 cache for the same few lines.
    inside = rows < end
    x_rows = x + rows.to(tl.int64) * K
    w_rows = w + (expert * N + outputs % N) * K
    groups = tl.cdiv(K, STEP)
    sx_rows = sx + tl.minimum(rows, end - 1).to(tl.int64) * groups  # in L1, unlike rows, and a mask takes registers
    sw_row = sw + (expert * tl.cdiv(N, STEP) + tl.program_id(1) * BN // STEP) * groups
    if IN_TURN:
        acc = tl.zeros((BM, BN) if ROWS_FIRST else (BN, BM), tl.float32)
        for start in range(0, K, chunk):
            stop = tl.minimum(start + chunk, K)
            acc += _sum_chunk(
                x_rows, inside, w_rows, sx_rows, sw_row, start, stop, K, BM, BN, STAGES, BLOCK_SCALED, ROWS_FIRST, EVEN
            )
    else:
        start = tl.program_id(2) * chunk
        stop = tl.minimum(start + chunk, K)
        acc = _sum_chunk(
            x_rows, inside, w_rows, sx_rows, sw_row, start, stop, K, BM, BN, STAGES, BLOCK_SCALED, ROWS_FIRST, EVEN
        )
    if ROWS_FIRST:
        acc = tl.trans(acc)
    if not BLOCK_SCALED:  # in blocks it costs more than it gains
        let_next_start(DEPENDENT)
    SCALED: tl.constexpr = "none" if BLOCK_SCALED else "both"
    sw += expert * N
    finish(acc, y, sx, sw, rows, end, outputs, N, partials, counters, chunks, BM, BN, PARALLEL, SCALED)


@triton.jit
def _sum_chunk(
    x, inside, w, sx, sw, start, stop, K,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_SCALED: tl.constexpr, ROWS_FIRST: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The sum over K from start to stop, group by group: [BN, BM] or, with ROWS_FIRST, [BM, BN]."""
    acc = tl.zeros((BM, BN) if ROWS_FIRST else (BN, BM), tl.int32 if w.dtype.element_ty == tl.int8 else tl.float32)
    for k in tl.range(start, stop, STEP, num_stages=STAGES):
        acc = _add_group(acc, x, inside, w, sx, sw, k, K, BLOCK_SCALED, ROWS_FIRST, EVEN)
    return acc


@triton.jit
def _add_group(
    acc, x, inside, w, sx, sw, k, K, BLOCK_SCALED: tl.constexpr, ROWS_FIRST: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """acc plus the product over 128 values of K. Rows first, a thread needs the scales of 2 rows instead of 16."""
    ks = tl.arange(0, STEP) + k
    if EVEN:
        w_group = tl.load(w[:, None] + ks[None, :])
        x_group = tl.load(x[None, :] + ks[:, None], inside[None, :], 0.0)
    else:
        w_group = tl.load(w[:, None] + ks[None, :], (ks < K)[None, :], 0.0)
        x_group = tl.load(x[None, :] + ks[:, None], (ks < K)[:, None] & inside[None, :], 0.0)
    if acc.dtype == tl.int32:
        acc = tl.dot(w_group, x_group, acc, out_dtype=tl.int32)
    elif ROWS_FIRST:
        scale = tl.load(sx + k // STEP)[:, None] * tl.load(sw + k // STEP)
        acc = tl.fma(tl.dot(tl.trans(x_group), tl.trans(w_group)), scale, acc)
    elif BLOCK_SCALED:
        scale = tl.load(sx + k // STEP)[None, :] * tl.load(sw + k // STEP)
        acc = tl.fma(tl.dot(w_group, x_group), scale, acc)
    else:
        acc = tl.dot(w_group, x_group, acc, max_num_imprecise_acc=STEP)
    return acc
