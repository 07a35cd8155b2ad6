"""bfloat16 products of few rows on Hopper that hardly ever stop reading weights.

Each multiprocessor runs at most one program. Outputs and rows are cut into tiles, and the tiles, laid one after the
other along K, into equal shares of steps: whole tiles, or pieces of them where tiles are few or do not go round. Of a
tile that several programs have a share of, each leaves its sum in memory, and the last one to come adds them up in the
order of K.

One warp copies weights and rows into a ring of stages in shared memory, others multiply. A program is launched while
kernels before it still run, as soon as its multiprocessor has room for it, and fills its ring with weights before it
awaits the rows: whoever writes weights must not be the kernel just before. (In a step of the engine none does.)

Shapes: M rows, K inputs, N outputs; a step is 128 of K.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.quant.kernels.counters import counters
from lockstep.quant.kernels.gluon_ring import SWIZZLED, async_load, async_store, barriers, places, thread_barrier
from lockstep.quant.kernels.triton_tiles import cdiv, multiprocessors

LINE = gl.constexpr(64)  # of K: what is copied, and multiplied, at a time
LINES = gl.constexpr(2)  # of a stage
OUTPUTS = gl.constexpr(64)  # of a tile
STAGES = {16: 10, 32: 8, 64: 6, 128: 4}  # for so many rows of a tile: about what shared memory holds
MOST_ROWS = max(STAGES)
MOST_PIECES = 4  # of a tile, as a rule


@dataclass(frozen=True, slots=True)
class Cut:
    """Of a product into tiles and shares."""

    rows: int  # of a tile
    row_tiles: int
    steps: int  # of a tile
    total: int  # steps of all tiles
    share: int  # steps of a program

    @property
    def programs(self) -> int:
        return cdiv(self.total, self.share)

    @property
    def pieces(self) -> int:
        """Most that a tile is in: one may begin at any multiple of what steps and share have in common."""
        return (self.share - gcd(self.steps, self.share) + self.steps - 1) // self.share + 1

    @property
    def cost(self) -> float:
        """About proportional to time on an H200: what a program copies (in KB), what all copy, the sums of pieces."""
        step = (OUTPUTS.value + self.rows) / 4
        return self.share * step + 0.012 * self.total * step + 2.5 * self.rows * self.pieces * (self.pieces > 1)


@cache
def cut(M: int, N: int, K: int, processors: int) -> Cut:
    """The one that costs least."""
    steps, cuts = cdiv(K, LINE.value * LINES.value), []
    for rows in (rows for rows in STAGES if min(M, 32) <= rows < max(2 * M, 32)):
        row_tiles = cdiv(M, rows)
        total = steps * row_tiles * cdiv(N, OUTPUTS.value)
        shares = (max(cdiv(total, processors), cdiv(steps, pieces)) for pieces in range(1, MOST_PIECES + 1))
        cuts += [Cut(rows, row_tiles, steps, total, share) for share in shares]
    return min(cuts, key=lambda one: one.cost)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """bfloat16 [M, K] and [N, K] to [M, N]. Up to MOST_ROWS; K and N multiples of 8."""
    assert x.shape[1] == weight.shape[1], "copies would fill up the shorter one with zeros"
    assert x.dtype == weight.dtype == torch.bfloat16
    (M, K), N, x = x.shape, len(weight), x.contiguous()
    assert 0 < M <= MOST_ROWS
    assert K % 8 == N % 8 == 0, "rows must begin at multiples of 16 bytes"
    work = cut(M, N, K, multiprocessors(x.device))
    y, num_sums = x.new_empty(M, N), work.programs * work.pieces * OUTPUTS.value * work.rows
    sums = torch.empty(num_sums if work.pieces > 1 else 1, dtype=torch.float32, device=x.device)
    _linear[(work.programs,)](
        TensorDescriptor.from_tensor(x, [work.rows, LINE.value], SWIZZLED.value),
        TensorDescriptor.from_tensor(weight, [OUTPUTS.value, LINE.value], SWIZZLED.value),
        TensorDescriptor.from_tensor(y, [work.rows, OUTPUTS.value], SWIZZLED.value),
        sums, counters(x.device), work.steps, work.total, work.share, work.pieces, work.row_tiles,
        STAGES=STAGES[work.rows], num_warps=4, maxnreg=96 if work.rows <= 64 else 128, launch_pdl=True,
    )  # fmt: skip
    return y


@gluon.jit(do_not_specialize=["steps", "total", "share", "pieces", "row_tiles"])
def _linear(x, w, y, sums, counters, steps, total, share, pieces, row_tiles, STAGES: gl.constexpr):
    gdc_launch_dependents()
    rows, weights = places(x, STAGES * LINES), places(w, STAGES * LINES)
    full, empty = barriers(STAGES, 1)
    ring, result = (rows, weights, full, empty), gl.allocate_shared_memory(y.dtype, y.block_type.shape, y.layout)
    begin = gl.program_id(0) * share
    end = gl.minimum(begin + share, total)
    gl.warp_specialize(
        [
            (_multiply_shares, (ring, y, result, sums, counters, begin, end, steps, share, pieces, row_tiles)),
            (_load, (ring, x, w, begin, end, steps, row_tiles)),
        ],
        [1],
        [40],
    )


@gluon.jit
def _load(ring, x, w, begin, end, steps, row_tiles):
    """Fills stages as soon as they are empty; the first ones with weights before there are rows."""
    _, _, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    ahead = gl.minimum(begin + STAGES, end)
    for step in range(begin, ahead):
        _load_weights(ring, w, step, step - begin, steps, row_tiles)
    gdc_wait()
    for step in range(begin, ahead):
        _load_rows(ring, x, step, step - begin, steps, row_tiles)
    for step in range(ahead, end):
        done = step - begin
        mbarrier.wait(empty.index(done % STAGES), (done // STAGES + 1) & 1)
        _load_weights(ring, w, step, done % STAGES, steps, row_tiles)
        _load_rows(ring, x, step, done % STAGES, steps, row_tiles)


@gluon.jit
def _load_weights(ring, w, step, stage, steps, row_tiles):
    rows, weights, full, _ = ring
    ready = full.index(stage)
    mbarrier.expect(ready, LINES * LINE * 2 * (OUTPUTS + rows.shape[1]))
    for line in gl.static_range(LINES):
        place = [step // steps // row_tiles * OUTPUTS, (step % steps * LINES + line) * LINE]
        async_load(w, place, ready, weights.index(stage * LINES + line))


@gluon.jit
def _load_rows(ring, x, step, stage, steps, row_tiles):
    rows, _, full, _ = ring
    for line in gl.static_range(LINES):
        place = [step // steps % row_tiles * rows.shape[1], (step % steps * LINES + line) * LINE]
        async_load(x, place, full.index(stage), rows.index(stage * LINES + line))


@gluon.jit
def _multiply_shares(ring, y, result, sums, counters, begin, end, steps, share, pieces, row_tiles):
    """Computes this program's tiles, and its pieces of the first and the last of them."""
    gdc_wait()
    step = begin
    while step < end:
        tile = step // steps
        count = gl.minimum((tile + 1) * steps, end) - step
        product = _multiply(ring, step - begin, count)
        if count == steps:
            _write(product, y, result, tile, row_tiles)
        else:
            _meet(product, y, result, sums, counters, tile, steps, share, pieces, row_tiles)
        step += count


@gluon.jit
def _multiply(ring, done, count):
    """The product [outputs, rows] over the next `count` steps in the ring."""
    rows, weights, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = rows.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    product = gl.zeros([OUTPUTS, ROWS], gl.float32, LAYOUT)
    for i in range(count):
        stage = (done + i) % STAGES
        mbarrier.wait(full.index(stage), (done + i) // STAGES & 1)
        started = warpgroup_mma_init(product)
        for line in gl.static_range(LINES):
            place = stage * LINES + line
            started = warpgroup_mma(weights.index(place), rows.index(place).permute([1, 0]), started, is_async=True)
        product = warpgroup_mma_wait(LINES, [started])
        mbarrier.arrive(empty.index((done + i + STAGES - 1) % STAGES), pred=i > 0)  # that stage is no longer read
    product = warpgroup_mma_wait(0, [product])
    mbarrier.arrive(empty.index((done + count - 1) % STAGES))
    return product


@gluon.jit
def _meet(product, y, result, sums, counters, tile, steps, share, pieces, row_tiles):
    """Leaves this piece of a tile; the last one to come adds up all of them and writes the tile."""
    SIZE: gl.constexpr = OUTPUTS * product.shape[1]
    first, last = tile * steps // share, ((tile + 1) * steps - 1) // share  # programs that have a piece of it
    outputs = gl.arange(0, OUTPUTS, gl.SliceLayout(1, product.type.layout))
    rows = gl.arange(0, product.shape[1], gl.SliceLayout(0, product.type.layout))
    place = sums + first * pieces * SIZE + outputs[:, None] * product.shape[1] + rows[None, :]
    gl.store(place + (gl.program_id(0) - first) * SIZE, product)
    thread_barrier()  # every thread's part is written before the arrival is announced
    if gl.atomic_add(counters + first, 1, sem="acq_rel") == last - first:
        total = gl.load(place, cache_modifier=".cg")
        for piece in range(1, last - first + 1):
            total += gl.load(place + piece * SIZE, cache_modifier=".cg")
        gl.store(counters + first, 0)
        _write(total, y, result, tile, row_tiles)


@gluon.jit
def _write(product, y, result, tile, row_tiles):
    """By way of shared memory, from where whole lines are copied, and no further than y goes."""
    place = [tile % row_tiles * product.shape[1], tile // row_tiles * OUTPUTS]
    result.permute([1, 0]).store(product.to(y.dtype))
    fence_async_shared()
    thread_barrier()
    async_store(y, place, result)
    tma.store_wait(0)
    thread_barrier()  # until it is read nobody may write the next one over it
