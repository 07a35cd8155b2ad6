"""w4a16 for 65 to 256 rows of bfloat16 on Hopper: tensor cores that do not wait for weights to be decoded.

Each multiprocessor runs one program. One of its warps copies codes and rows into a ring of stages in shared memory; two
groups of four take a tile's first outputs and its others, decode their codes in registers and multiply them. Neither
awaits the other: while one decodes, the tensor cores work on what the other has decoded. In Gluon, for Triton itself
keeps all warps in step.

Tiles are dealt out in turns. As many as go round evenly are computed whole. Each of the rest is cut along K into as
many equal pieces as keep all multiprocessors busy: these leave their sums in memory, await each other, and add up and
write some rows each, in the order of K. So K is cut by a rule that looks at M, N, K and the device.

The arithmetic is that of `triton_four`. Shapes: M rows, K inputs (a multiple of 128), N outputs; a step is 128 of K.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lockstep.quant.kernels.counters import counters
from lockstep.quant.kernels.gluon_ring import barriers
from lockstep.quant.kernels.triton_configs import WideTile
from lockstep.quant.kernels.triton_decode import SHRUNK, TO_HIGH, TO_LOW, TO_SCALES
from lockstep.quant.kernels.triton_tiles import GROUP, cdiv, multiprocessors

STEP, HALF = gl.constexpr(GROUP), gl.constexpr(GROUP // 2)
PAIRS = gl.constexpr(GROUP // 4)  # of bytes, in a step of one output
OUTPUTS = gl.constexpr(128)  # of a tile
SHARE = gl.constexpr(64)  # of these, of each group of warps
ADDED = gl.constexpr(16)  # rows of a tile whose pieces are added at a time
_ROWS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_PAIRS = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
# With the loading warp, which counts as four, and both groups all registers there are. Programs that await each other
# must all run.
_COMPILED = {"num_warps": 4, "maxnreg": 168, "launch_cooperative_grid": True}


@dataclass(frozen=True, slots=True)
class Deal:
    """Who computes what."""

    row_tiles: int
    tiles: int
    programs: int
    rounds: int  # tiles that each program computes whole
    pieces: int  # of each tile that remains
    share: int  # steps of a piece, but for the last of a tile, which may have fewer

    @property
    def cut(self) -> int:
        """Tiles that are computed in pieces."""
        return self.tiles - self.rounds * self.programs if self.pieces > 1 else 0


def deal(tile: WideTile, M: int, N: int, K: int, processors: int) -> Deal:
    """The longest turn is what counts. Pieces that straddle tiles would be shorter, but more of them would meet."""
    row_tiles, steps = cdiv(M, tile.all_rows), K // GROUP
    tiles = row_tiles * cdiv(N, OUTPUTS.value)
    rounds, rest = divmod(tiles, processors)
    most = min(processors // rest, tile.all_rows // ADDED.value) if rest else 1  # more would have nothing to add up
    share = cdiv(steps, most)
    pieces = cdiv(steps, share)
    return Deal(row_tiles, tiles, processors if rounds else rest * pieces, rounds, pieces, share)


def w4a16_matmul(x: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype, tile: WideTile) -> Tensor:
    """bfloat16 [M, K], uint8 [N, K/2], float32 scales [N, K/128] to [M, N]."""
    (M, K), N = x.shape, len(packed)
    x, codes = x.contiguous(), packed.contiguous().view(torch.int16)
    y = torch.empty(M, N, dtype=dtype, device=x.device)
    work = deal(tile, M, N, K, multiprocessors(x.device))
    sums = torch.empty(work.cut * work.pieces * OUTPUTS.value * tile.all_rows, dtype=torch.float32, device=x.device)
    x_tiles = TensorDescriptor.from_tensor(x, [tile.rows, HALF.value], _ROWS)
    more_tiles = TensorDescriptor.from_tensor(x, [tile.more_rows, HALF.value], _ROWS) if tile.more_rows else None
    w_tiles = TensorDescriptor.from_tensor(codes, [OUTPUTS.value, PAIRS.value], _PAIRS)
    _wide[(work.programs,)](
        x_tiles, more_tiles, w_tiles, scales, y, sums, counters(x.device), M, N, K // GROUP,
        work.row_tiles, work.tiles, work.rounds, work.pieces, work.share, *scales.stride(), STAGES=tile.stages,
        **_COMPILED,
    )  # fmt: skip
    return y


@gluon.jit(do_not_specialize=["M", "steps", "row_tiles", "tiles", "rounds", "pieces", "share"])
def _wide(
    x, more_x, w, scales, y, sums, counters, M, N, steps, row_tiles, tiles, rounds, pieces, share, scale_n, scale_k,
    STAGES: gl.constexpr,
):  # fmt: skip
    rows = (gl.allocate_shared_memory(x.dtype, [STAGES * 2, x.block_type.shape[0], HALF], x.layout),)
    if more_x is not None:
        more = gl.allocate_shared_memory(x.dtype, [STAGES * 2, more_x.block_type.shape[0], HALF], x.layout)
        rows = (rows[0], more)
    codes = gl.allocate_shared_memory(gl.int16, [STAGES, OUTPUTS, PAIRS], w.layout)
    full, empty = barriers(STAGES, 2)
    ring, work = (rows, codes, full, empty), (steps, row_tiles, tiles, rounds, pieces, share)
    given = (ring, work, scales, scale_n, scale_k, y, sums, counters, M, N)
    gl.warp_specialize(
        [
            (_multiply_tiles, (given, gl.constexpr(0))),
            (_multiply_tiles, (given, gl.constexpr(1))),
            (_load_tiles, (ring, work, x, more_x, w)),
        ],
        [4, 1],
        [232, 40],
    )


@gluon.jit
def _turn(work, turn):
    """What this program does in a turn: the tile, the first step of it, how many. No steps: it has no such turn."""
    steps, _, tiles, rounds, pieces, share = work
    program = gl.program_id(0)
    tile, first, count = program * rounds + turn, 0, steps
    if turn == rounds:
        tile = rounds * gl.num_programs(0) + program // pieces
        first = program % pieces * share
        count = gl.where(tile < tiles, gl.minimum(share, steps - first), 0)
    return tile, first, count


@gluon.constexpr_function
def _all_rows(rows):
    """Of a tile."""
    return sum(part.shape[1] for part in rows)


@gluon.jit
def _load_tiles(ring, work, x, more_x, w):
    """Fills stages as soon as they are empty."""
    rows, codes, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = _all_rows(rows)
    row_tiles, rounds, done = work[1], work[3], 0
    for turn in range(rounds + 1):
        tile, first, count = _turn(work, turn)
        row, output = tile % row_tiles * ROWS, tile // row_tiles * OUTPUTS
        for step in range(first, first + count):
            stage = done % STAGES
            mbarrier.wait(empty.index(stage), (done // STAGES + 1) & 1)
            ready = full.index(stage)
            mbarrier.expect(ready, OUTPUTS * HALF + ROWS * STEP * 2)
            tma.async_copy_global_to_shared(w, [output, step * PAIRS], ready, codes.index(stage))
            for half in gl.static_range(2):
                k, place = step * STEP + half * HALF, stage * 2 + half
                tma.async_copy_global_to_shared(x, [row, k], ready, rows[0].index(place))
                if more_x is not None:
                    tma.async_copy_global_to_shared(more_x, [row + rows[0].shape[1], k], ready, rows[1].index(place))
            done += 1


@gluon.jit
def _multiply_tiles(given, SIDE: gl.constexpr):
    """Computes and writes a group's outputs of this program's tiles, and its part of the one it has a piece of."""
    ring, work, scales, scale_n, scale_k, y, sums, counters, M, N = given
    rows = ring[0]
    ROWS: gl.constexpr = _all_rows(rows)
    LAYOUT: gl.constexpr = gl.SliceLayout(1, _pairs_layout(SHARE, PAIRS, gl.num_warps()))
    steps, row_tiles, _, rounds, pieces, _ = work
    sums += SIDE * (ROWS * SHARE)
    done = 0
    for turn in range(rounds + 1):
        tile, first, count = _turn(work, turn)
        row, output = tile % row_tiles * ROWS, tile // row_tiles * OUTPUTS + SIDE * SHARE
        if count > 0:
            # Beyond the last output: any other's scale will do, the result is not written.
            outputs = (output + gl.arange(0, SHARE, LAYOUT)) % N
            products = _multiply(ring, scales + outputs * scale_n + first * scale_k, scale_k, done, count, SIDE)
            done += count
            if count == steps:
                for i in gl.static_range(len(rows)):
                    _write(products[i], y, row + i * rows[0].shape[1], output, M, N)
            else:
                for i in gl.static_range(len(rows)):
                    _leave(products[i], sums + gl.program_id(0) * (ROWS * OUTPUTS) + i * (rows[0].shape[1] * SHARE))
                _add_up(sums, counters + SIDE, pieces, y, row, output, M, N, ROWS)


@gluon.constexpr_function
def _pairs_layout(outputs, pairs, warps):
    """Who holds which pair of bytes [outputs, pairs]: the thread from which wgmma takes the weights in it."""
    across = [[0, 1 << i] for i in range(pairs.bit_length() - 1)]
    down = [[1 << i, 0] for i in range(outputs.bit_length() - 1)]
    last_warp = 4 + warps.bit_length() - 1
    return gl.DistributedLinearLayout(
        reg_bases=[down[3], *across[2:], *down[last_warp:]],
        lane_bases=[*across[:2], *down[:3]],
        warp_bases=down[4:last_warp],
        block_bases=[],
        shape=[outputs, pairs],
    )


@gluon.jit
def _multiply(ring, scales, scale_k, done, count, SIDE: gl.constexpr):
    """The products [SHARE, rows] over the next `count` steps in the ring, times 2^-SHRUNK."""
    rows, codes, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, _product_layout(rows[0].shape[1], gl.num_warps()), 2)
    LAYOUT: gl.constexpr = _pairs_layout(SHARE, PAIRS, gl.num_warps())
    products = [_nothing(part.shape[1]) for part in rows]
    busy = gl.zeros([SHARE, HALF], gl.bfloat16, WEIGHTS)  # weights that the tensor cores may still be reading
    scale = gl.load(scales)
    for i in range(count):
        stage = (done + i) % STAGES
        low, high, excess = _scale_pairs(scale)
        scales += scale_k
        scale = gl.load(scales, i + 1 < count)
        mbarrier.wait(full.index(stage), (done + i) // STAGES & 1)
        pairs = codes.index(stage).slice(SIDE * SHARE, SHARE).load(LAYOUT)
        for half in gl.static_range(2):
            weights = _decode(pairs, high if half else low, excess, half, WEIGHTS)
            started = _start(products, weights, rows, stage * 2 + half)
            # Of a product left under way at the end of a step ptxas would await every single instruction.
            products, busy = _await(started, busy, 0 if half else len(rows))
            busy = weights
        mbarrier.arrive(empty.index(stage))
    return products


@gluon.constexpr_function
def _product_layout(rows, warps):
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, rows, 16])


@gluon.jit
def _nothing(ROWS: gl.constexpr):
    return gl.zeros([SHARE, ROWS], gl.float32, _product_layout(ROWS, gl.num_warps()))


@gluon.jit
def _start(products, weights, rows, place):
    """The products plus weights times rows, in the making."""
    started = (_start_one(products[0], weights, rows[0].index(place)),)
    if len(rows) == 2:
        same = gl.convert_layout(weights, gl.DotOperandLayout(0, products[1].type.layout, 2), assert_trivial=True)
        started = (started[0], _start_one(products[1], same, rows[1].index(place)))
    return started


@gluon.jit
def _start_one(product, weights, rows):
    return warpgroup_mma(weights, rows.permute([1, 0]), warpgroup_mma_init(product), is_async=True)


@gluon.jit
def _await(started, busy, UNDER_WAY: gl.constexpr):
    """The products, when all but so many are complete, and weights that are then no longer read."""
    if len(started) == 1:
        first, busy = warpgroup_mma_wait(UNDER_WAY, [started[0], busy])
        products = (first,)
    else:
        first, second, busy = warpgroup_mma_wait(UNDER_WAY, [started[0], started[1], busy])
        products = (first, second)
    return products, busy


@gluon.jit
def _scale_pairs(scale):
    """What nibbles at bit 0 are multiplied with, those at bit 4, and what their excess of 8 comes to."""
    return gl.inline_asm_elementwise(
        TO_SCALES, "=&r,=&r,=&r,r", [scale.expand_dims(1)], dtype=(gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def _decode(pairs, scale, excess, HIGH: gl.constexpr, LAYOUT: gl.constexpr):
    """The low or the high codes of pairs of bytes, times the scale and 2^-SHRUNK, as bfloat16 [SHARE, HALF]."""
    ASSEMBLY: gl.constexpr = TO_HIGH if HIGH else TO_LOW
    first, second = gl.inline_asm_elementwise(
        ASSEMBLY, "=h,=h,h,r,r", [pairs, scale, excess], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
    )
    return gl.convert_layout(gl.reshape(gl.join(first, second), [SHARE, HALF]), LAYOUT, assert_trivial=True)


@gluon.jit
def _leave(acc, place):
    """A piece's sum, as [rows, SHARE]."""
    outputs = gl.arange(0, SHARE, gl.SliceLayout(1, acc.type.layout))
    rows = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    gl.store(place + rows[None, :] * SHARE + outputs[:, None], acc)


@gluon.jit
def _add_up(sums, counters, pieces, y, row, output, M, N, ROWS: gl.constexpr):
    """Awaits the other pieces of this program's tile, and adds up and writes some of its rows."""
    piece, number = gl.program_id(0) % pieces, gl.program_id(0) // pieces
    counter, first = counters + number * 2, sums + number * pieces * (ROWS * OUTPUTS)
    gl.thread_barrier()  # every thread's part is written before the arrival is announced
    gl.atomic_add(counter, 1, sem="acq_rel")
    while gl.atomic_add(counter, 0, sem="acquire") < pieces:
        pass
    for some in range(piece * ADDED, ROWS, pieces * ADDED):
        _add_rows(first + some * SHARE, pieces, y, row + some, output, M, N, ROWS)
    gl.thread_barrier()
    if gl.atomic_add(counter, 1, sem="acq_rel") == 2 * pieces - 1:
        gl.store(counter, 0)


@gluon.jit
def _add_rows(sums, pieces, y, row, output, M, N, ROWS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, ADDED, gl.SliceLayout(1, LAYOUT))
    outputs = gl.arange(0, SHARE, gl.SliceLayout(0, LAYOUT))
    place = sums + rows[:, None] * SHARE + outputs[None, :]
    total = gl.load(place, cache_modifier=".cg")
    for _ in range(1, pieces):
        place += ROWS * OUTPUTS
        total += gl.load(place, cache_modifier=".cg")
    _store(_result(total, y), y, row + rows[:, None], output + outputs[None, :], M, N)


@gluon.jit
def _write(acc, y, row, output, M, N):
    """Threads exchange what they hold, so that neighbours write neighbouring outputs."""
    WIDTH: gl.constexpr = 128 // y.dtype.element_ty.primitive_bitwidth  # a thread's outputs: 16 bytes
    LANES: gl.constexpr = SHARE // WIDTH
    LAYOUT: gl.constexpr = gl.BlockedLayout([WIDTH, 1], [LANES, 32 // LANES], [1, gl.num_warps()], [0, 1])
    rows = row + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    outputs = output + gl.arange(0, SHARE, gl.SliceLayout(1, LAYOUT))[:, None]
    _store(gl.convert_layout(_result(acc, y), LAYOUT), y, rows, outputs, M, N)


@gluon.jit
def _result(total, y):
    return (total * 2.0**SHRUNK).to(y.dtype.element_ty)


@gluon.jit
def _store(value, y, rows, outputs, M, N):
    gl.store(y + rows.to(gl.int64) * N + outputs, value, (rows < M) & (outputs < N))
