"""w4a16 for 65 to 256 rows of bfloat16 on Hopper: tensor cores that do not wait for weights to be decoded.

Each multiprocessor runs one program. One of its warps copies codes, scales and rows into a ring of stages in shared
memory; two or three groups of four take 64 outputs of a tile each, decode their codes in registers and multiply them.
None awaits another: while one decodes, the tensor cores work on what the others have decoded. In Gluon, for Triton
itself keeps all warps in step.

Tiles are dealt out in turns (`gluon_deal`). Of a tile that several programs have a piece of, all but the last leave
their sums in memory; the last awaits them and adds them to its own, always in the same order. Whoever is awaited has a
lower number, and programs start in the order of their numbers.

A program is launched while the kernel before still runs, as soon as its multiprocessor has room for it, and fetches its
first codes into the L2 cache until there are rows.

The arithmetic is that of `triton_four`. Shapes: M rows, K inputs (a multiple of 128), N outputs; a step is 128 of K.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.quant.kernels.counters import MOST, counters
from lockstep.quant.kernels.gluon_deal import choose
from lockstep.quant.kernels.gluon_ring import async_gather, async_load, barriers, thread_barrier
from lockstep.quant.kernels.triton_configs import WideTile
from lockstep.quant.kernels.triton_decode import SHRUNK, TO_HIGH, TO_LOW, TO_SCALES
from lockstep.quant.kernels.triton_tiles import GROUP, multiprocessors

STEP, HALF = gl.constexpr(GROUP), gl.constexpr(GROUP // 2)
PAIRS = gl.constexpr(GROUP // 4)  # of bytes, in a step of one output
SHARE = gl.constexpr(64)  # outputs of a tile, of each group of warps
_ROWS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_PAIRS = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
_SCALES = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0]))
_LOADED = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))  # outputs, by the loading warp
_FLAT = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
# By groups: registers of a thread at the start, of a group's and of the loading warp's, which counts as four. The first
# group gets what is left: together all there are.
_REGISTERS = {2: (168, 232, 40), 3: (128, 160, 24)}


def w4a16_matmul(x: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype, tiles: tuple[WideTile, ...]) -> Tensor:
    """bfloat16 [M, K], uint8 [N, K/2], float32 scales [N, K/128] to [M, N]."""
    (M, K), N = x.shape, len(packed)
    x, codes = x.contiguous(), packed.contiguous().view(torch.int16)
    y = torch.empty(M, N, dtype=dtype, device=x.device)
    processors = multiprocessors(x.device)
    tile, work = choose(tiles, M, N, K, processors)
    assert tile.groups * processors <= MOST, "too few counters for the pieces of so many programs"
    sums = torch.empty(work.cut * work.programs * tile.outputs * tile.all_rows, dtype=torch.float32, device=x.device)
    x_tiles = TensorDescriptor.from_tensor(x, [tile.rows, HALF.value], _ROWS)
    more_tiles = TensorDescriptor.from_tensor(x, [tile.more_rows, HALF.value], _ROWS) if tile.more_rows else None
    w_tiles = TensorDescriptor.from_tensor(codes, [SHARE.value, PAIRS.value], _PAIRS)
    at_start, group, loading = _REGISTERS[tile.groups]
    _wide[(work.programs,)](
        x_tiles, more_tiles, w_tiles, codes, scales, y, sums, counters(x.device), M, N, K // GROUP,
        work.row_tiles, work.rounds, work.rest, work.share, *scales.stride(), STAGES=tile.stages, GROUPS=tile.groups,
        REGISTERS=group, LOADING=loading, num_warps=4, maxnreg=at_start, launch_pdl=True,
    )  # fmt: skip
    return y


@gluon.jit(do_not_specialize=["M", "steps", "row_tiles", "rounds", "rest", "share"])
def _wide(
    x, more_x, w, packed, scales, y, sums, counters, M, N, steps, row_tiles, rounds, rest, share, scale_n, scale_k,
    STAGES: gl.constexpr, GROUPS: gl.constexpr, REGISTERS: gl.constexpr, LOADING: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    rows = (gl.allocate_shared_memory(x.dtype, [STAGES * 2, x.block_type.shape[0], HALF], x.layout),)
    if more_x is not None:
        more = gl.allocate_shared_memory(x.dtype, [STAGES * 2, more_x.block_type.shape[0], HALF], x.layout)
        rows = (rows[0], more)
    codes = gl.allocate_shared_memory(gl.int16, [STAGES * GROUPS, SHARE, PAIRS], w.layout)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES * GROUPS, SHARE], _SCALES)
    full, empty = barriers(STAGES, GROUPS)
    ring, work = (rows, codes, factors, full, empty), (steps, row_tiles, rounds, rest, share)
    given, loaded = (ring, work, y, sums, counters, M, N), (x, more_x, w, packed, scales, scale_n, scale_k, N)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply_tiles, (given, gl.constexpr(0), GROUPS)),
                (_multiply_tiles, (given, gl.constexpr(1), GROUPS)),
                (_load_tiles, (ring, work, loaded, GROUPS)),
            ],
            [4, 1],
            [REGISTERS, LOADING],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_tiles, (given, gl.constexpr(0), GROUPS)),
                (_multiply_tiles, (given, gl.constexpr(1), GROUPS)),
                (_multiply_tiles, (given, gl.constexpr(2), GROUPS)),
                (_load_tiles, (ring, work, loaded, GROUPS)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADING],
        )


@gluon.jit
def _turn(work, turn):
    """What this program does in a turn: the tile, the first step of it, how many. No steps: it has no such turn.

    A share has steps of two tiles at most. The later tile's are first in turn: another program awaits their sum.
    """
    steps, _, rounds, rest, share = work
    program = gl.program_id(0)
    tile, first, count = program * rounds + turn, 0, steps
    if turn >= rounds:
        begin = gl.minimum(program * share, rest)
        end = gl.minimum(begin + share, rest)
        tile = begin // steps
        border = (tile + 1) * steps
        if turn == rounds:
            tile += 1
            count = gl.maximum(end - border, 0)
        else:
            first = begin % steps
            count = gl.minimum(end, border) - begin
        tile += rounds * gl.num_programs(0)
    return tile, first, count


@gluon.constexpr_function
def _all_rows(rows):
    """Of a tile."""
    return sum(part.shape[1] for part in rows)


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    """The stage after this one, and the phase of its barriers: it changes each time round."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), phase ^ last.to(gl.int32)


@gluon.jit
def _load_tiles(ring, work, loaded, GROUPS: gl.constexpr):
    """Fills stages as soon as they are empty."""
    rows, codes, factors, full, empty = ring
    x, more_x, w, packed, scales, scale_n, scale_k, N = loaded
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = _all_rows(rows)
    _, row_tiles, rounds, _, _ = work
    _fetch_ahead(packed, work, N, GROUPS, STAGES)
    gdc_wait()
    stage, phase = 0, 1
    for turn in range(rounds + 2):
        tile, first, count = _turn(work, turn)
        row, output = tile % row_tiles * ROWS, tile // row_tiles * (GROUPS * SHARE)
        for step in range(first, first + count):
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            for group in gl.static_range(GROUPS):
                outputs = output + group * SHARE + gl.arange(0, SHARE, _LOADED)
                place = scales + outputs * scale_n + step * scale_k
                async_gather(factors.index(stage * GROUPS + group), place, outputs < N)
            async_copy.mbarrier_arrive(ready)
            mbarrier.expect(ready, GROUPS * SHARE * HALF + ROWS * STEP * 2)
            for group in gl.static_range(GROUPS):
                place = codes.index(stage * GROUPS + group)
                async_load(w, [output + group * SHARE, step * PAIRS], ready, place)
            for half in gl.static_range(2):
                k, place = step * STEP + half * HALF, stage * 2 + half
                async_load(x, [row, k], ready, rows[0].index(place))
                if more_x is not None:
                    async_load(more_x, [row + rows[0].shape[1], k], ready, rows[1].index(place))
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _fetch_ahead(packed, work, N, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """Brings the codes of the first stages into the L2 cache. Whoever may still write them writes to the same cache."""
    steps, row_tiles, _, _, _ = work
    tile, first, count = _turn(work, 0)
    if count == 0:
        tile, first, count = _turn(work, 1)
    for group in gl.static_range(GROUPS):
        outputs = tile // row_tiles * (GROUPS * SHARE) + group * SHARE + gl.arange(0, SHARE, _LOADED)
        places = packed + (gl.minimum(outputs, N - 1).to(gl.int64) * steps + first) * PAIRS
        for step in range(0, gl.minimum(count, STAGES), 2):  # 128 bytes
            gl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [(places + step * PAIRS).to(gl.int64)],
                dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@gluon.jit
def _multiply_tiles(given, SIDE: gl.constexpr, GROUPS: gl.constexpr):
    """Computes and writes a group's outputs of this program's tiles, and leaves or adds up its parts of pieces."""
    ring, work, y, sums, counters, M, N = given
    rows = ring[0]
    steps, row_tiles, rounds, _, share = work
    gdc_wait()
    stage, phase = 0, 0
    for turn in range(rounds + 2):
        tile, first, count = _turn(work, turn)
        if count > 0:
            products, stage, phase = _multiply(ring, stage, phase, count, SIDE, GROUPS)
            row, output = tile % row_tiles * _all_rows(rows), tile // row_tiles * (GROUPS * SHARE) + SIDE * SHARE
            target = (y, row, output, M, N)
            number = tile - rounds * gl.num_programs(0)  # among the tiles that remain
            own, counter = sums + SIDE * (_all_rows(rows) * SHARE), counters + number * GROUPS + SIDE
            if count == steps:
                _write(products, target)
            elif first + count < steps:
                _leave(products, own, counter, GROUPS)
            else:
                _add_up(products, own, counter, number * steps // share, target, GROUPS)


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
def _multiply(ring, stage, phase, count, SIDE: gl.constexpr, GROUPS: gl.constexpr):
    """The products [SHARE, rows] over the next `count` stages, times 2^-SHRUNK, and the stage and phase after them."""
    rows, codes, factors, full, empty = ring
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, _product_layout(rows[0].shape[1], gl.num_warps()), 2)
    LAYOUT: gl.constexpr = _pairs_layout(SHARE, PAIRS, gl.num_warps())
    products = [_nothing(part.shape[1]) for part in rows]
    busy = gl.zeros([SHARE, HALF], gl.bfloat16, WEIGHTS)  # weights that the tensor cores may still be reading
    for _ in range(count):
        mbarrier.wait(full.index(stage), phase)
        taken, place = stage, stage * GROUPS + SIDE
        stage, phase = _next(stage, phase, full.shape[0])
        low, high, excess = _scale_pairs(factors.index(place).load(gl.SliceLayout(1, LAYOUT)))
        pairs = codes.index(place).load(LAYOUT)
        for half in gl.static_range(2):
            weights = _decode(pairs, high if half else low, excess, half, WEIGHTS)
            started = _start(products, weights, rows, taken * 2 + half)
            # Of a product left under way at the end of a step ptxas would await every single instruction.
            products, busy = _await(started, busy, 0 if half else len(rows))
            busy = weights
        mbarrier.arrive(empty.index(taken))
    return products, stage, phase


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
def _leave(products, sums, counter, GROUPS: gl.constexpr):
    """This piece's sums, and the word that they are there."""
    place = sums + gl.program_id(0) * (_all_columns(products) * GROUPS * SHARE)
    for i in gl.static_range(len(products)):
        flat = _flat(products[i])
        gl.store(place + i * (products[0].shape[1] * SHARE) + gl.arange(0, flat.shape[0], _FLAT), flat)
    thread_barrier()  # every thread's part is written before the arrival is announced
    gl.atomic_add(counter, 1, sem="release")


@gluon.jit
def _add_up(products, sums, counter, first, target, GROUPS: gl.constexpr):
    """Awaits the pieces of the programs from `first` to this one, adds them to its own and writes the tile."""
    SIZE: gl.constexpr = _all_columns(products) * GROUPS * SHARE
    program = gl.program_id(0)
    while gl.atomic_add(counter, 0, sem="acquire") < program - first:
        pass
    gl.store(counter, 0)
    y, row, output, M, N = target
    for i in gl.static_range(len(products)):
        total = _flat(products[i])
        place = sums + first * SIZE + i * (products[0].shape[1] * SHARE) + gl.arange(0, total.shape[0], _FLAT)
        for _ in range(first, program):
            total += gl.load(place, cache_modifier=".cg")
            place += SIZE
        _write([_from_flat(total)], (y, row + i * products[0].shape[1], output, M, N))


@gluon.constexpr_function
def _all_columns(products):
    return sum(product.shape[1] for product in products)


@gluon.jit
def _flat(product):
    """As [SHARE * rows], what a thread holds side by side: no thread has to know where the others' numbers lie."""
    parts = gl.reshape(product, [4, 2, 8, product.shape[1] // 8, 4, 2])
    flat = gl.reshape(gl.permute(parts, [3, 0, 2, 4, 1, 5]), [product.shape[1] * SHARE])
    return gl.convert_layout(flat, _FLAT, assert_trivial=True)


@gluon.jit
def _from_flat(flat):
    ROWS: gl.constexpr = flat.shape[0] // SHARE
    parts = gl.permute(gl.reshape(flat, [ROWS // 8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    return gl.reshape(parts, [SHARE, ROWS])


@gluon.jit
def _write(products, target):
    for i in gl.static_range(len(products)):
        _write_one(products[i], target, i * products[0].shape[1])


@gluon.jit
def _write_one(product, target, more):
    """Threads of a warp exchange 16-bit results, so that each writes 16 bytes."""
    y, row, output, M, N = target
    BLOCKED: gl.constexpr = gl.BlockedLayout([8, 1], [2, 16], [gl.num_warps(), 1], [0, 1])
    LAYOUT: gl.constexpr = BLOCKED if y.dtype.element_ty.primitive_bitwidth == 16 else product.type.layout
    rows = row + more + gl.arange(0, product.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    outputs = output + gl.arange(0, SHARE, gl.SliceLayout(1, LAYOUT))[:, None]
    result = gl.convert_layout((product * 2.0**SHRUNK).to(y.dtype.element_ty), LAYOUT)
    gl.store(y + rows.to(gl.int64) * N + outputs, result, (rows < M) & (outputs < N))
