"""Many rows times weights that have a scale for every group of 128 inputs, on Hopper: fp8 blocks and w4a8.

A group's sum leaves the tensor cores to be scaled and added in float32, and they should not wait for that. So a
program is three groups of warps: one loads tiles, some steps ahead, and two multiply, one while the other scales. Each
program works through several tiles of the result; those at work at the same time share what they read. In Gluon, for
Triton itself would have the two wait for each other.

The arithmetic is that of `triton_eight` and `triton_four`, bit for bit: a group's sum by the tensor cores, one fused
multiplication and addition of it, chunks of K summed apart and added left to right.

The tensor cores multiply 64 lines [64, K] by up to 128 columns [128, K]. Lines are what the scales belong to, so that a
thread needs two of them: rows in fp8 blocks, outputs in w4a8.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lockstep.quant.kernels.gluon_ring import async_load, barriers
from lockstep.quant.kernels.triton_configs import ManyTile
from lockstep.quant.kernels.triton_decode import OPERANDS, TO_E4M3, TO_INT8
from lockstep.quant.kernels.triton_tiles import cdiv, multiprocessors

STEP, HALF, LINES = gl.constexpr(128), gl.constexpr(64), gl.constexpr(64)
BAND = gl.constexpr(16)  # tiles of lines that are computed side by side
_BYTES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_NIBBLES = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
_COMPILED = {"num_warps": 4, "enable_fp_fusion": False}


def fp8_block_matmul(
    xq: Tensor, sx: Tensor, wq: Tensor, sw: Tensor, dtype: torch.dtype, chunk: int, tile: ManyTile
) -> Tensor:
    """As `triton_eight.fp8_block_matmul`, K cut into parts of `chunk`. K is a multiple of 16."""
    (M, K), N = xq.shape, len(wq)
    xq, sx, wq, sw = xq.contiguous(), sx.contiguous(), wq.contiguous(), sw.contiguous()
    y = torch.empty(M, N, dtype=dtype, device=xq.device)
    x_tiles = TensorDescriptor.from_tensor(xq, [LINES.value, STEP.value], _BYTES)
    w_tiles = TensorDescriptor.from_tensor(wq, [tile.outputs, STEP.value], _BYTES)
    tiles = cdiv(M, tile.rows), cdiv(N, tile.outputs)
    programs, chunks = min(multiprocessors(xq.device), tiles[0] * tiles[1]), cdiv(K, chunk)
    totals = torch.empty(programs * tile.rows * tile.outputs if chunks > 1 else 1, device=xq.device)
    _fp8_blocks[(programs,)](
        x_tiles, w_tiles, sx, sw, y, totals, M, N, cdiv(K, STEP.value), chunks, chunk // STEP.value, *tiles,
        PIECES=tile.rows // LINES.value, COLUMNS=tile.outputs, STAGES=tile.stages, **_COMPILED,
    )  # fmt: skip
    return y


def w4a8_matmul(
    xq: Tensor, sx: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype, chunk: int, tile: ManyTile
) -> Tensor:
    """As `triton_four.w4a8_matmul` and `w4a8_fp8_matmul`, K cut into parts of `chunk`. K is a multiple of 128."""
    assert tile.outputs == 2 * LINES.value, "each multiplier has 64 outputs"
    (M, K), N = xq.shape, len(packed)
    xq, packed = xq.contiguous(), packed.contiguous()
    y = torch.empty(M, N, dtype=dtype, device=xq.device)
    w_tiles = TensorDescriptor.from_tensor(packed, [LINES.value, HALF.value], _NIBBLES)
    x_tiles = TensorDescriptor.from_tensor(xq, [tile.rows, STEP.value], _BYTES)
    tiles = cdiv(N, tile.outputs), cdiv(M, tile.rows)
    _four_bits[(min(multiprocessors(xq.device), tiles[0] * tiles[1]),)](
        w_tiles, x_tiles, sx, scales, y, M, N, K // STEP.value, cdiv(K, chunk), chunk // STEP.value, *scales.stride(),
        *tiles, COLUMNS=tile.rows, STAGES=tile.stages, **_COMPILED,
    )  # fmt: skip
    return y


@gluon.jit(do_not_specialize=["M", "G", "chunks", "chunk_groups", "line_tiles", "column_tiles"])
def _fp8_blocks(
    x, w, sx, sw, y, totals, M, N, G, chunks, chunk_groups, line_tiles, column_tiles,
    PIECES: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    lines = gl.allocate_shared_memory(x.dtype, [STAGES * PIECES, LINES, STEP], x.layout)
    columns = gl.allocate_shared_memory(w.dtype, [STAGES, COLUMNS, STEP], w.layout)
    full, empty = barriers(STAGES, 2)
    given = (
        lines, columns, full, empty, sx, sw, y, totals, M, N, G, chunks, chunk_groups, line_tiles, column_tiles,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_multiply_fp8, (given, gl.constexpr(0))),
            (_multiply_fp8, (given, gl.constexpr(1))),
            (_load_tiles, (x, w, lines, columns, full, empty, G, line_tiles, column_tiles)),
        ],
        [4, 1],
        [232, 24],
    )


@gluon.jit(do_not_specialize=["M", "G", "chunks", "chunk_groups", "line_tiles", "column_tiles"])
def _four_bits(
    w, x, sx, sw, y, M, N, G, chunks, chunk_groups, sw_output, sw_group, line_tiles, column_tiles,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    lines = gl.allocate_shared_memory(w.dtype, [STAGES * 2, LINES, HALF], w.layout)
    columns = gl.allocate_shared_memory(x.dtype, [STAGES, COLUMNS, STEP], x.layout)
    # Without conflicts of banks for what a warp holds of a sum: 8 lines, 8 columns beside each other.
    totals = gl.allocate_shared_memory(gl.float32, [2, LINES, COLUMNS], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    full, empty = barriers(STAGES, 2)
    given = (
        lines, columns, full, empty, sx, sw, y, totals, M, N, G, chunks, chunk_groups, sw_output, sw_group, line_tiles,
        column_tiles,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_multiply_four, (given, gl.constexpr(0))),
            (_multiply_four, (given, gl.constexpr(1))),
            (_load_tiles, (w, x, lines, columns, full, empty, G, line_tiles, column_tiles)),
        ],
        [4, 1],
        [232, 24],
    )


@gluon.jit
def _locate(tile, line_tiles, column_tiles):
    """In bands of lines, so that programs at work at the same time need few lines and few columns."""
    first = tile // (BAND * column_tiles) * BAND
    height = gl.minimum(line_tiles - first, BAND)
    within = tile % (BAND * column_tiles)
    return first + within % height, within // height


@gluon.jit
def _next_stage(stage, phase, STAGES: gl.constexpr):
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _load_tiles(line_source, column_source, lines, columns, full, empty, G, line_tiles, column_tiles):
    STAGES: gl.constexpr = columns.shape[0]
    PIECES: gl.constexpr = lines.shape[0] // STAGES
    WIDTH: gl.constexpr = lines.shape[2]  # bytes of a group
    stage, phase = 0, 1
    for tile in range(gl.program_id(0), line_tiles * column_tiles, gl.num_programs(0)):
        line_tile, column_tile = _locate(tile, line_tiles, column_tiles)
        first_line, first_column = line_tile * (PIECES * LINES), column_tile * columns.shape[1]
        for group in range(G):
            mbarrier.wait(empty.index(stage), phase)
            arrived = full.index(stage)
            mbarrier.expect(arrived, PIECES * LINES * WIDTH + columns.shape[1] * STEP)
            for piece in gl.static_range(PIECES):
                place = [first_line + piece * LINES, group * WIDTH]
                async_load(line_source, place, arrived, lines.index(stage * PIECES + piece))
            place = [first_column, group * STEP]
            async_load(column_source, place, arrived, columns.index(stage))
            stage, phase = _next_stage(stage, phase, STAGES)


@gluon.jit
def _multiply_fp8(given, WHICH: gl.constexpr):
    """One half of a tile's rows, 64 at a time."""
    lines, columns, full, empty, sx, sw, y, totals, M, N, G, chunks, chunk_groups, line_tiles, column_tiles = given
    STAGES: gl.constexpr = columns.shape[0]
    PIECES: gl.constexpr = lines.shape[0] // STAGES
    BN: gl.constexpr = columns.shape[1]
    TWO: gl.constexpr = PIECES == 4
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    line = gl.arange(0, LINES, gl.SliceLayout(1, SUM))
    output = gl.arange(0, BN, gl.SliceLayout(0, SUM))
    own = (gl.program_id(0) * PIECES + WHICH * (PIECES // 2)) * LINES + line
    total = totals + own[:, None] * BN + output[None, :]
    stage, phase = 0, 0
    part = gl.zeros((LINES, BN), gl.float32, SUM)
    for tile in range(gl.program_id(0), line_tiles * column_tiles, gl.num_programs(0)):
        row_tile, output_tile = _locate(tile, line_tiles, column_tiles)
        first = (row_tile * PIECES + WHICH * (PIECES // 2)) * LINES
        sx_a = sx + gl.minimum(first + line, M - 1) * G
        sx_b = sx + gl.minimum(first + LINES + line, M - 1) * G
        sw_row = sw + output_tile * BN // STEP * G
        scale_a, scale_b, scale_w = gl.load(sx_a), gl.load(sx_b), gl.load(sw_row)
        acc_a = gl.zeros((LINES, BN), gl.float32, SUM)
        acc_b = acc_a
        for chunk in range(chunks):
            acc_a = gl.zeros((LINES, BN), gl.float32, SUM)
            acc_b = acc_a
            for group in range(chunk * chunk_groups, gl.minimum((chunk + 1) * chunk_groups, G)):
                mbarrier.wait(full.index(stage), phase)
                piece = stage * PIECES + WHICH * (PIECES // 2)
                weight = columns.index(stage).permute((1, 0))
                following = gl.minimum(group + 1, G - 1)
                running = warpgroup_mma(lines.index(piece), weight, part, use_acc=False, is_async=True)
                next_w, next_a = gl.load(sw_row + following), gl.load(sx_a + following)
                part = warpgroup_mma_wait(0, deps=[running])
                if not TWO:
                    mbarrier.arrive(empty.index(stage))
                acc_a = _fused(part, (scale_a * scale_w)[:, None], acc_a)
                if TWO:
                    running = warpgroup_mma(lines.index(piece + 1), weight, part, use_acc=False, is_async=True)
                    next_b = gl.load(sx_b + following)
                    part = warpgroup_mma_wait(0, deps=[running])
                    mbarrier.arrive(empty.index(stage))
                    acc_b = _fused(part, (scale_b * scale_w)[:, None], acc_b)
                    scale_b = next_b
                scale_a, scale_w = next_a, next_w
                stage, phase = _next_stage(stage, phase, STAGES)
            if chunk > 0:
                acc_a += gl.load(total)
                if TWO:
                    acc_b += gl.load(total + LINES * BN)
            if chunk + 1 < chunks:
                gl.store(total, acc_a)
                if TWO:
                    gl.store(total + LINES * BN, acc_b)
        _write(acc_a, y, first, output_tile * BN, N, 1, M, N, OUT)
        if TWO:
            _write(acc_b, y, first + LINES, output_tile * BN, N, 1, M, N, OUT)


@gluon.jit
def _multiply_four(given, WHICH: gl.constexpr):
    """One half of a tile's outputs."""
    (
        lines, columns, full, empty, sx, sw, y, totals, M, N, G, chunks, chunk_groups, sw_output, sw_group, line_tiles,
        column_tiles,
    ) = given  # fmt: skip
    STAGES: gl.constexpr = columns.shape[0]
    BM: gl.constexpr = columns.shape[1]
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 32])
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    INTEGER: gl.constexpr = columns.dtype == gl.int8
    total = totals.index(WHICH)
    stage, phase = 0, 0
    part = gl.zeros((LINES, BM), gl.int32 if INTEGER else gl.float32, SUM)
    for tile in range(gl.program_id(0), line_tiles * column_tiles, gl.num_programs(0)):
        output_tile, row_tile = _locate(tile, line_tiles, column_tiles)
        first = (output_tile * 2 + WHICH) * LINES
        sw_outputs = sw + gl.minimum(first + gl.arange(0, LINES, gl.SliceLayout(1, SUM)), N - 1) * sw_output
        scale = gl.load(sw_outputs)
        acc = gl.zeros((LINES, BM), gl.float32, SUM)
        for chunk in range(chunks):
            acc = gl.zeros((LINES, BM), gl.float32, SUM)
            for group in range(chunk * chunk_groups, gl.minimum((chunk + 1) * chunk_groups, G)):
                mbarrier.wait(full.index(stage), phase)
                weight = _decode(lines.index(stage * 2 + WHICH), columns.dtype, SUM)
                x = columns.index(stage).permute((1, 0))
                running = warpgroup_mma(weight, x, part, use_acc=False, is_async=True)
                following = gl.load(sw_outputs + gl.minimum(group + 1, G - 1) * sw_group)
                part = warpgroup_mma_wait(0, deps=[running])
                mbarrier.arrive(empty.index(stage))
                acc = _fused(part.to(gl.float32), (scale * (0.0625 if INTEGER else 512.0))[:, None], acc)
                scale = following
                stage, phase = _next_stage(stage, phase, STAGES)
            if chunk > 0:
                acc += total.load(SUM)
            if chunk + 1 < chunks:
                total.store(acc)
        rows = row_tile * BM + gl.arange(0, BM, gl.SliceLayout(0, SUM))
        value = acc * gl.load(sx + rows, rows < M, 0.0)[None, :]
        _write(value, y, first, row_tile * BM, 1, N, N, M, OUT)


@gluon.jit
def _fused(part, scale, acc):
    """acc + part·scale, rounded once. In assembly: as an operation of the compiler's it is put off, and spills."""
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [part, scale, acc], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _write(value, y, line, column, line_stride, column_stride, num_lines, num_columns, OUT: gl.constexpr):
    value = gl.convert_layout(value.to(y.dtype.element_ty), OUT)
    lines = line + gl.arange(0, value.shape[0], gl.SliceLayout(1, OUT))
    columns = column + gl.arange(0, value.shape[1], gl.SliceLayout(0, OUT))
    place = y + lines.to(gl.int64)[:, None] * line_stride + columns.to(gl.int64)[None, :] * column_stride
    gl.store(place, value, (lines < num_lines)[:, None] & (columns < num_columns)[None, :])


@gluon.jit
def _decode(packed, dtype: gl.constexpr, SUM: gl.constexpr):
    """A group of 64 outputs as the tensor cores take it from registers: codes times 16 in int8, over 512 in e4m3."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUM, k_width=4)
    codes = packed.load(OPERAND)
    if dtype == gl.int8:
        low, high = gl.inline_asm_elementwise(TO_INT8, OPERANDS, [codes], (gl.int8, gl.int8), is_pure=True, pack=4)
    else:
        low, high = gl.inline_asm_elementwise(TO_E4M3, OPERANDS, [codes], (gl.int8, gl.int8), is_pure=True, pack=4)
        low, high = low.to(gl.float8e4nv, bitcast=True), high.to(gl.float8e4nv, bitcast=True)
    in_order = gl.reshape(gl.permute(gl.join(low, high), (0, 2, 1)), (LINES, STEP))
    return gl.convert_layout(in_order, OPERAND, assert_trivial=True)
