"""Decode attention of few sequences, in bfloat16 on Hopper, that hardly ever stops reading keys and values.

Each multiprocessor runs two programs, each for one key/value head. The pages of all sequences are laid end to end and
dealt out in shares of about a size, however long each sequence is: pieces of a long one, or some whole short ones. Who
gets what is found once a step, for all layers (`deal`). Of a sequence in several pieces each program leaves its own in
memory, and the last one to come puts them together.

One warp copies pages into a ring of stages in shared memory, others multiply. A program is launched while kernels
before it still run, and reads on until it comes to a key that the one just before it writes, the newest of a sequence.
What was dealt out, and the tables of pages, it reads at once: whoever writes these must not be among the kernels that
may still run. (In a step of the engine the embedding comes between, a launch that waits for all before it.)

A block is multiplied from where it lies, keys and sizes as rows, queries as columns. Scores, weights and sums are those
of `attention.py`: weights are relative to a power of two.

Shapes: B sequences, H key/value heads, G queries per key/value head, D head size, P pages, S page size.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.models.kernels.attention import LOG2E
from lockstep.models.kv import Pages
from lockstep.quant.kernels.gluon_ring import SWIZZLED, async_load, barriers, places, reinterpret, thread_barrier
from lockstep.quant.kernels.triton_tiles import cdiv, multiprocessors, power_of_2

LINE = gl.constexpr(64)  # of a head: what is copied, and multiplied, at a time
KEYS = gl.constexpr(64)  # of a block
STAGES = 3
AT_ONCE = 2  # programs of a multiprocessor
LEAST = 8  # sequences: a lone one took longer than with `attention.decode`, on an H200, and eight did not
MOST = 4  # sequences for each share: 256 with 33 shares took longer than with `attention.decode`, and 128 did not
NEAR = tl.constexpr(8)  # an eighth of a share from either end of a sequence, no share begins within it
SOME = 8  # shares whose beginning a program of `deal` finds


class Work(NamedTuple):
    """Of one step, dealt out: int32, on the device."""

    start: Tensor  # [B + 3] of each sequence, its first page among all; behind them the number of pages
    lengths: Tensor  # [B + 1] keys of each, at least one; behind them 0
    share_start: Tensor  # [shares + 1] of each share, its first page
    share_sequence: Tensor  # [shares + 1] and the sequence that this is of
    share_size: Tensor  # [1] pages, about
    arrived: Tensor  # [B, H] zeros, with which pieces of a sequence count themselves


def suits(batch: int, pages: Pages, num_queries: int) -> bool:
    """Whether sequences are few, and keys and values such as it was tried with."""
    _, page_size, heads, size = pages.keys.shape
    few = LEAST <= batch < MOST * num_shares(heads, pages.keys.device)
    return few and size in (64, 128) and page_size == 16 and num_queries // heads <= 32


def num_shares(heads: int, device: torch.device) -> int:
    return max(1, AT_ONCE * multiprocessors(device) // heads)


def deal(lengths_B: Tensor, heads: int, page_size: int) -> Work:
    """Among programs that all run at the same time, the pages of so many keys."""
    batch, shares = len(lengths_B), num_shares(heads, lengths_B.device)
    sizes = [batch + 3, batch + 1, shares + 1, shares + 1, 1, batch * heads]
    work = Work(*torch.empty(sum(sizes), dtype=torch.int32, device=lengths_B.device).split(sizes))
    _deal[(cdiv(shares + 1, SOME),)](
        lengths_B, *work, batch, shares, S=page_size, H=heads, BLOCK=max(256, power_of_2(batch + 3)),
        SOME=SOME, num_warps=4,
    )  # fmt: skip
    return work


def decode(query_BHD: Tensor, cache: Pages, pages_BP: Tensor, work: Work, scale: float) -> Tensor:
    """One query per sequence, which sees the keys that were dealt out."""
    batch, num_queries, size = query_BHD.shape
    _, page_size, heads, _ = cache.keys.shape
    group, shares = num_queries // heads, len(work.share_start) - 1
    out = torch.empty_like(query_BHD)
    pieces = torch.empty((batch + shares) * num_queries, size + 2, dtype=torch.float32, device=out.device)
    box = [page_size, LINE.value]
    keys, values = (TensorDescriptor.from_tensor(x.view(-1, heads * size), box, SWIZZLED.value) for x in cache[:2])
    _decode[(shares * heads,)](
        keys, values, query_BHD, pages_BP, *work, out, pieces, scale * LOG2E, pages_BP.stride(0), batch, H=heads,
        G=group, D=size, S=page_size, STAGES=STAGES, COLUMNS=max(8, power_of_2(group)), num_warps=4,
        maxnreg=128, launch_pdl=True,
    )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["batch", "shares"],
    do_not_specialize_on_alignment=[  # these begin anywhere in one tensor
        "start_out", "lengths_out", "share_start_out", "share_sequence_out", "share_size_out", "arrived_out",
    ],
)  # fmt: skip
def _deal(
    lengths_ptr, start_out, lengths_out, share_start_out, share_sequence_out, share_size_out, arrived_out, batch,
    shares, S: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Every program finds where SOME shares begin; the first one writes down the sequences."""
    b = tl.arange(0, BLOCK)
    there = b < batch
    lengths = tl.load(lengths_ptr + b, mask=there, other=0).to(tl.int32)
    pages = tl.cdiv(lengths, S)
    starts, total = tl.cumsum(pages, 0) - pages, tl.sum(pages, 0)
    share_size = tl.cdiv(total, shares)
    if tl.program_id(0) == 0:
        tl.store(start_out + b, starts, mask=b < batch + 3)  # those behind the last begin where it ends
        tl.store(lengths_out + b, lengths, mask=b < batch + 1)
        tl.store(share_size_out, share_size)
        for head in range(H):
            tl.store(arrived_out + head * batch + b, 0, mask=there)
    share = tl.program_id(0) * SOME + tl.arange(0, SOME)
    at = tl.minimum(share * share_size, total)
    upto = (starts[None, :] <= at[:, None]) & there[None, :]
    sequence = tl.sum(upto.to(tl.int32), 1) - 1  # that it would begin within
    start = tl.max(tl.where(upto, starts[None, :], 0), 1)
    stop = tl.min(tl.where(upto | (b >= batch)[None, :], total, starts[None, :]), 1)
    near, up = tl.minimum(at - start, stop - at) <= share_size // NEAR, stop - at < at - start  # as in `_cut`
    tl.store(share_start_out + share, tl.where(near, tl.where(up, stop, start), at), mask=share <= shares)
    tl.store(share_sequence_out + share, sequence + (near & up), mask=share <= shares)


@triton.jit
def _cut(start, stop, share_size):
    """(first share, number) of the pieces of a sequence. A share begins at a multiple of their size or, if that is near
    to where a sequence begins or stops, at the nearer of these (`_deal`)."""
    close = share_size // NEAR
    first = min(start + close, (start + stop) // 2) // share_size
    return first, max((stop - close - 1) // share_size - (start + close) // share_size, 0) + 1


@gluon.jit(
    do_not_specialize=["page_stride", "batch"],
    do_not_specialize_on_alignment=[
        "start_ptr", "lengths_ptr", "share_start_ptr", "share_sequence_ptr", "share_size_ptr", "arrived_ptr",
    ],
)  # fmt: skip
def _decode(
    keys, values, q_ptr, pages_ptr, start_ptr, lengths_ptr, share_start_ptr, share_sequence_ptr, share_size_ptr,
    arrived_ptr, out_ptr, pieces_ptr, scale, page_stride, batch,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, S: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    PLACES: gl.constexpr = STAGES * (D // LINE) * (KEYS // S)
    full, empty = barriers(STAGES, 1, KEYS // S)
    ring = places(keys, PLACES), places(values, PLACES), full, empty
    queries = gl.allocate_shared_memory(gl.bfloat16, [D // LINE, COLUMNS, LINE], SWIZZLED)
    weights = gl.allocate_shared_memory(gl.bfloat16, [COLUMNS, KEYS], SWIZZLED)
    share, h = gl.program_id(0) // H, gl.program_id(0) % H
    sequence = gl.load(share_sequence_ptr + share)
    at, end = gl.load(share_start_ptr + share), gl.load(share_start_ptr + share + 1)
    work = start_ptr, lengths_ptr, share_size_ptr, arrived_ptr
    gl.warp_specialize(
        [
            (
                _attend,
                (ring, queries, weights, q_ptr, work, out_ptr, pieces_ptr, scale, batch, share, h, sequence, at, end, H,
                 G, D, S),
            ),
            (_load, (ring, keys, values, pages_ptr, page_stride, start_ptr, h, sequence, at, end, D, S)),
        ],
        [1],
        [64],
    )  # fmt: skip


@gluon.jit
def _load(
    ring, keys, values, pages_ptr, page_stride, start_ptr, h, sequence, at, end, D: gl.constexpr, S: gl.constexpr
):  # fmt: skip
    """Fills stages as soon as they are empty. Before the newest key of a sequence is read it must have been written.

    Which pages come next is looked up one block ahead, and where a sequence ends one sequence ahead.
    """
    _, _, full, empty = ring
    PAGES: gl.constexpr = KEYS // S
    STAGES: gl.constexpr = full.shape[0]
    stop, next_stop = gl.load(start_ptr + sequence + 1), gl.load(start_ptr + sequence + 2)
    table = pages_ptr + sequence.to(gl.int64) * page_stride + at - gl.load(start_ptr + sequence)
    pages = _look_up(table, gl.minimum(stop, end) - at, PAGES)
    done = 0
    while at < end:
        num_pages = gl.minimum(PAGES, gl.minimum(stop, end) - at)
        newest, now = at + num_pages == stop, pages
        at += num_pages
        table += num_pages
        if newest:
            sequence += 1
            table = pages_ptr + sequence.to(gl.int64) * page_stride
            stop, next_stop = next_stop, gl.load(start_ptr + sequence + 2)
        pages = _look_up(table, gl.minimum(stop, end) - at, PAGES)
        mbarrier.wait(empty.index(done % STAGES), (done // STAGES + 1) & 1)
        if newest:
            gdc_wait()
        _copy(ring, keys, values, now, num_pages, done % STAGES, h, D, S)
        done += 1


@gluon.jit
def _look_up(table, num_pages, PAGES: gl.constexpr):
    """The next pages, of which there are so many."""
    pages = ()
    for place in gl.static_range(PAGES):
        page = gl.load(table + place, mask=place < num_pages, other=0).to(gl.int32)
        pages = pages + (page,)  # noqa: RUF005 - Gluon has no starred expressions
    return pages


@gluon.jit
def _copy(ring, keys, values, pages, num_pages, stage, h, D: gl.constexpr, S: gl.constexpr):
    """That many of the pages into a stage."""
    ring_keys, ring_values, full, _ = ring
    PAGES: gl.constexpr = KEYS // S
    ready = full.index(stage)
    for place in gl.static_range(PAGES):
        there = place < num_pages
        mbarrier.expect(ready, 2 * S * D * 2, pred=there)
        mbarrier.arrive(ready, pred=place >= num_pages)
        for line in gl.static_range(D // LINE):
            to, at = (stage * (D // LINE) + line) * PAGES + place, [pages[place] * S, h * D + line * LINE]
            async_load(keys, at, ready, ring_keys.index(to), pred=there)
            async_load(values, at, ready, ring_values.index(to), pred=there)


@gluon.jit
def _attend(
    ring, queries, weights, q_ptr, work, out_ptr, pieces_ptr, scale, batch, share, h, sequence, at, end,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """To what was dealt to a program. Queries are fetched one sequence ahead."""
    start_ptr, lengths_ptr, share_size_ptr, arrived_ptr = work
    start, stop = gl.load(start_ptr + sequence), gl.load(start_ptr + sequence + 1)
    length = gl.load(lengths_ptr + sequence)
    share_size, done = gl.load(share_size_ptr), gl.to_tensor(0)
    ring = _in_blocks(ring[0]), _in_blocks(ring[1]), ring[2], ring[3]
    gdc_wait()
    fetched = _fetch_queries(q_ptr, sequence, h, batch, queries.shape[1], H, G, D)
    while at < end:
        num_pages = gl.minimum(stop, end) - at
        num_keys = gl.minimum(length - (at - start) * S, num_pages * S)
        thread_barrier()
        for line in gl.static_range(D // LINE):
            queries.index(line).store(fetched[line])
        fence_async_shared()
        thread_barrier()
        fetched = _fetch_queries(q_ptr, sequence + 1, h, batch, queries.shape[1], H, G, D)
        next_stop, next_length = gl.load(start_ptr + sequence + 2), gl.load(lengths_ptr + sequence + 1)

        top, mass, sums, done = _attend_to_blocks(ring, queries, weights, num_pages, num_keys, scale, done, D, S)
        first, num_pieces = _cut(start, stop, share_size)
        result = out_ptr + ((sequence * H + h) * G).to(gl.int64) * D
        if num_pieces == 1:
            _write(result, sums, mass, G, D)
        else:
            piece, arrived = (share + sequence) * H + h, arrived_ptr + sequence * H + h
            _leave(pieces_ptr, piece * G, top, mass, sums, G, D)
            _meet(pieces_ptr, (first + sequence) * H + h, num_pieces, arrived, result, sums, H, G, D)
        at += num_pages
        sequence += 1
        start, stop, length = stop, next_stop, next_length


@gluon.jit
def _in_blocks(pages):
    """The same shared memory, in blocks of keys."""
    BLOCKS: gl.constexpr = pages.shape[0] * pages.shape[1] // KEYS
    return reinterpret(pages, gl.bfloat16, [BLOCKS, KEYS, LINE])


@gluon.jit
def _fetch_queries(
    q_ptr, sequence, h, batch, COLUMNS: gl.constexpr, H: gl.constexpr, G: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """Those of a sequence; zeros in nobody's columns."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    c = gl.arange(0, COLUMNS, gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, LINE, gl.SliceLayout(0, LAYOUT))
    row = q_ptr + ((sequence * H + h) * G + c).to(gl.int64) * D
    lines = ()
    for line in gl.static_range(D // LINE):
        there = ((c < G) & (sequence < batch))[:, None]
        q = gl.load(row[:, None] + line * LINE + d[None, :], mask=there, other=0.0)
        lines = lines + (q,)  # noqa: RUF005 - as above
    return lines


@gluon.jit
def _attend_to_blocks(ring, queries, weights, num_pages, num_keys, scale, done, D: gl.constexpr, S: gl.constexpr):
    """Largest score, mass and sums of values over the next pages in the ring."""
    keys, values, full, empty = ring
    PAGES: gl.constexpr = KEYS // S
    LINES: gl.constexpr = D // LINE
    STAGES: gl.constexpr = full.shape[0]
    COLUMNS: gl.constexpr = weights.shape[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    n = gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))
    top = gl.full([COLUMNS], float("-inf"), gl.float32, gl.SliceLayout(0, LAYOUT))
    mass, sums = gl.zeros([KEYS, COLUMNS], gl.float32, LAYOUT), ()
    for _ in gl.static_range(LINES):
        sums = sums + (gl.zeros([LINE, COLUMNS], gl.float32, LAYOUT),)  # noqa: RUF005 - as above
    for block in range(0, num_pages, PAGES):
        stage, left = done % STAGES, num_keys - block * S
        mbarrier.wait(full.index(stage), done // STAGES & 1)
        scores = gl.zeros([KEYS, COLUMNS], gl.float32, LAYOUT)
        for line in gl.static_range(LINES):
            columns = queries.index(line).permute([1, 0])
            scores = warpgroup_mma(keys.index(stage * LINES + line), columns, scores, is_async=True)
        scores = warpgroup_mma_wait(0, [scores])
        scores = gl.where((n < left)[:, None], scores * scale, float("-inf"))
        larger = gl.maximum(top, gl.ceil(gl.max(scores, 0)))
        weight, fade = gl.exp2(scores - larger[None, :]).to(gl.bfloat16), gl.exp2(top - larger)
        weights.permute([1, 0]).store(weight)
        if left < KEYS:
            for line in gl.static_range(LINES):
                _clear(values.index(stage * LINES + line), left)
        fence_async_shared()
        thread_barrier()
        added = ()
        for line in gl.static_range(LINES):
            rows, faded = values.index(stage * LINES + line).permute([1, 0]), sums[line] * fade[None, :]
            one = warpgroup_mma(rows, weights.permute([1, 0]), faded, is_async=True)
            added = added + (one,)  # noqa: RUF005 - as above
        top, mass, sums = larger, mass * fade[None, :] + weight.to(gl.float32), ()
        for line in gl.static_range(LINES):
            sums = sums + (warpgroup_mma_wait(LINES - 1 - line, [added[line]]),)  # noqa: RUF005 - as above
        thread_barrier()  # nobody reads the stage any more
        mbarrier.arrive(empty.index(stage))
        done += 1
    return top, gl.sum(mass, 0), sums, done


@gluon.jit
def _clear(tile, left):
    """Values that are nobody's: what lies there may be no number, and no weight makes that zero."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    n = gl.arange(0, tile.shape[0], gl.SliceLayout(1, LAYOUT))
    tile.store(gl.where((n < left)[:, None], tile.load(LAYOUT), 0.0).to(gl.bfloat16))


@gluon.jit
def _write(result, sums, mass, G: gl.constexpr, D: gl.constexpr):
    d, c = _rows_and_columns(sums[0])
    for line in gl.static_range(D // LINE):
        value = (sums[line] / mass[None, :]).to(gl.bfloat16)
        gl.store(result + c[None, :] * D + d[:, None] + line * LINE, value, mask=(c < G)[None, :])


@gluon.jit
def _leave(pieces_ptr, row, top, mass, sums, G: gl.constexpr, D: gl.constexpr):
    """A piece, for who puts it together with others."""
    d, c = _rows_and_columns(sums[0])
    place = pieces_ptr + (row + c).to(gl.int64) * (D + 2)
    for line in gl.static_range(D // LINE):
        gl.store(place[None, :] + d[:, None] + line * LINE, sums[line], mask=(c < G)[None, :])
    gl.store(place + D, top, mask=c < G)
    gl.store(place + D + 1, mass, mask=c < G)


@gluon.jit
def _meet(pieces_ptr, piece, num_pieces, arrived, result, sums, H: gl.constexpr, G: gl.constexpr, D: gl.constexpr):
    """The last one to come puts all pieces together, in their order whoever that is."""
    thread_barrier()  # every thread's part is written before the arrival is announced
    if gl.atomic_add(arrived, 1, sem="acq_rel") == num_pieces - 1:
        top, mass, sums = _taken(pieces_ptr, piece * G, sums, G, D)
        for other in range(1, num_pieces):
            top, mass, sums = _put_together(top, mass, sums, _taken(pieces_ptr, (piece + other * H) * G, sums, G, D), D)
        gl.store(arrived, 0)
        _write(result, sums, mass, G, D)


@gluon.jit
def _taken(pieces_ptr, row, sums, G: gl.constexpr, D: gl.constexpr):
    """A piece that was left, as threads hold their own."""
    d, c = _rows_and_columns(sums[0])
    place = pieces_ptr + (row + c).to(gl.int64) * (D + 2)
    tops = gl.load(place + D, mask=c < G, other=0.0, cache_modifier=".cg")
    masses = gl.load(place + D + 1, mask=c < G, other=0.0, cache_modifier=".cg")
    lines = ()
    for line in gl.static_range(D // LINE):
        where = place[None, :] + d[:, None] + line * LINE
        value = gl.load(where, mask=(c < G)[None, :], other=0.0, cache_modifier=".cg")
        lines = lines + (value,)  # noqa: RUF005 - as above
    return tops, masses, lines


@gluon.jit
def _put_together(top, mass, sums, other, D: gl.constexpr):
    other_top, other_mass, other_sums = other
    larger = gl.maximum(top, other_top)
    fade, weight, both = gl.exp2(top - larger), gl.exp2(other_top - larger), ()
    for line in gl.static_range(D // LINE):
        value = sums[line] * fade[None, :] + other_sums[line] * weight[None, :]
        both = both + (value,)  # noqa: RUF005 - as above
    return larger, mass * fade + other_mass * weight, both


@gluon.jit
def _rows_and_columns(tile):
    """Rows and columns of one, as its threads hold them."""
    rows = gl.arange(0, tile.shape[0], gl.SliceLayout(1, tile.type.layout))
    return rows, gl.arange(0, tile.shape[1], gl.SliceLayout(0, tile.type.layout))
