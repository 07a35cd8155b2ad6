"""Attention over pages in Triton: one query each (decode) and chunks of queries (prefill).

What `paged.attend` computes in torch, without gathering pages: keys and values are read where they lie, once per
key/value head for all of its G queries. Scores, softmax and sums are float32; the weights of the values are rounded to
the queries' type before the product, as flash attention does. But they are taken relative to a power of two, the next
one above the largest score so far: however keys are cut into blocks, a weight is rounded alike, or nearly always. So a
decode step, a prefill and the learner, which runs the prefill kernel (`models/varlen.py`), differ by little more than
the order of sums.

`exact` leaves out both. Scores are rounded to a grid that no power of two moves them off, blocks of keys begin at
multiples of their size, each is summed by the tensor cores, which gave the same bits in every tile on an H200, and
their sums are added in float64: no order of these is seen in 16 bits, in practice. For bfloat16 only.

8-bit keys and values are turned into the queries' type as they are read; their scales multiply scores and weights. For
bfloat16 a head is computed in two halves, its even and its odd values: a pair of bytes is fetched like one number of 16
bits, straight into the registers that multiply, and is decoded there.

Shapes: B sequences, N tokens, H key/value heads, G queries per key/value head, D head size, P pages, S page size.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.models.kv import Pages, Spans
from lockstep.models.paged import MEMBERS, Shared
from lockstep.quant.kernels.triton_decode import FROM_E4M3
from lockstep.quant.kernels.triton_tiles import DEPENDENT, await_inputs, cdiv, let_next_start, multiprocessors

LOG2E, LN2 = 1.4426950408889634, tl.constexpr(0.6931471805599453)
GRID = tl.constexpr(1.5 * 2**9)  # added and taken away again, it rounds a float32 to multiples of 2^-14
MOST_SPLITS = 32
PAIRS_DECODED = DEPENDENT  # by assembly that there is from Hopper on


@dataclass(frozen=True, slots=True)
class Tile:
    """How decode steps are compiled: a program reads so many keys and values at a time."""

    keys: int
    warps: int
    stages: int  # Triton's num_stages, of which looking up pages takes half


SMALL, LARGE, MANY = Tile(32, 2, 4), Tile(64, 2, 2), Tile(64, 4, 2)  # found on an H200
BLOCK = 64  # keys: those of a prefill, and of every tile that is exact
FEW_EXACT = Tile(BLOCK, 4, 3)  # takes the place of SMALL
SMALL_SUMS, LARGE_SUMS = 32 * 128, 16 * 128  # values of a program's queries for which two warps have registers
SPARSE, AT_ONCE, DENSE = 4, 6, 15  # programs for each multiprocessor; it runs six of SMALL at the same time
PREFILLED = 64  # queries of a program that prefills


def decode(
    query_BHD: Tensor,
    cache: Pages,
    pages_BP: Tensor,
    lengths_B: Tensor,
    scale: float,
    window: int | None,
    shared: Shared | None = None,
    *,
    exact: bool = False,
) -> Tensor:
    """One query per sequence, which sees the first `lengths` keys of its pages (or the last `window` of these)."""
    batch, num_queries, size = query_BHD.shape
    _, page_size, heads, _ = cache.keys.shape
    group, processors = num_queries // heads, multiprocessors(query_BHD.device)
    out = torch.empty_like(query_BHD)
    splits, common = num_splits(batch * heads, processors), 0
    if shared is not None:
        common = fill(cdiv(batch, MEMBERS) * heads, processors)
    pieces, queries = splits + common, (MEMBERS if common else 1) * group
    tile = choose_tile(batch * heads, processors, queries, size, query_BHD.element_size(), exact)
    whole = None if common else out  # with common pieces nobody's result is of one, and not to write it saves registers
    shape = (pieces, batch, num_queries, size + 2) if pieces > 1 else ()
    partial = query_BHD.new_empty(shape, dtype=torch.float64 if exact else torch.float32)
    _decode[heads, batch, pieces](  # the heads of a sequence run together: their keys lie side by side
        query_BHD, *cache, pages_BP, lengths_B, *(shared or (None,) * 4), whole, partial, scale * LOG2E,
        pages_BP.stride(0), splits, common, H=heads, G=group, D=size, S=page_size, BLOCK_N=tile.keys, MEMBERS=MEMBERS,
        WINDOW=window or 0, PRECISION=_precision(query_BHD), EXACT=exact, DEPENDENT=DEPENDENT, launch_pdl=DEPENDENT,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=not exact,
    )  # fmt: skip
    if pieces > 1:
        _combine[batch, num_queries](
            partial, out, pieces, D=size, MOST=2 * MOST_SPLITS, FEW=4, DEPENDENT=DEPENDENT, launch_pdl=DEPENDENT,
            num_warps=1, enable_fp_fusion=not exact,
        )  # fmt: skip
    return out


def choose_tile(
    programs: int, processors: int, queries: int, size: int, num_bytes: int = 2, exact: bool = False
) -> Tile:
    """Small ones for few programs; and more warps where the `queries` of each are many, or float32."""
    sums = num_rows(queries) * size
    if programs <= SPARSE * processors and sums <= SMALL_SUMS:
        return FEW_EXACT if exact else SMALL
    return LARGE if sums <= LARGE_SUMS and num_bytes == 2 else MANY


def prefill(
    query_NHD: Tensor,
    cache: Pages,
    pages_BP: Tensor,
    spans: Spans,
    longest: int,
    scale: float,
    window: int | None,
    lse_HN: Tensor | None = None,
    *,
    exact: bool = False,
) -> Tensor:
    """Of at most `longest` queries per sequence; each sees the keys up to its own. The log of each one's sum of
    exponentials goes to `lse`."""
    _, num_queries, size = query_NHD.shape
    _, page_size, heads, _ = cache.keys.shape
    out = torch.empty_like(query_NHD)
    stages = 3 if size * query_NHD.element_size() <= 256 else 2  # more would not fit
    _prefill[cdiv(longest, PREFILLED), num_queries, len(pages_BP)](
        query_NHD, *cache, pages_BP, *spans, out, lse_HN, len(query_NHD), scale * LOG2E,
        pages_BP.stride(0), HQ=num_queries, H=heads, D=size, S=page_size, BLOCK_M=PREFILLED, BLOCK_N=BLOCK,
        WINDOW=window or 0, PRECISION=_precision(query_NHD), EXACT=exact, num_warps=4, num_stages=stages,
        enable_fp_fusion=not exact,
    )  # fmt: skip
    return out


def num_splits(programs: int, processors: int) -> int:
    """Into how many pieces keys are cut. Of few programs, so that they fill the device about once; of more, so that it
    matters little whose keys are many. From DENSE for each multiprocessor on, nothing is gained."""
    if programs <= SPARSE * processors:
        return fill(programs, AT_ONCE * processors)
    return cdiv(DENSE * processors, programs)


def uncut(heads: int, device: torch.device) -> int:
    """How many sequences no longer have their keys cut, if 512 are not fewer."""
    return min(512, cdiv(DENSE * multiprocessors(device), heads))


def fill(programs: int, places: int) -> int:
    """How often so many programs fit into so many places: at least once, at most MOST_SPLITS times."""
    return min(MOST_SPLITS, max(1, places // programs))


def _precision(query: Tensor) -> str:
    return "ieee" if query.dtype == torch.float32 else "tf32"


@triton.constexpr_function
def num_rows(queries: int) -> int:
    """Rows of a tile that hold so many: the tensor cores want 16, Triton a power of two."""
    return max(16, triton.next_power_of_2(queries))


@triton.constexpr_function
def in_pairs(memory: tl.dtype, query: tl.dtype, size: int) -> bool:
    """Whether heads are computed in halves, each of them large enough for the tensor cores."""
    return PAIRS_DECODED and memory == tl.float8e4nv and query == tl.bfloat16 and size >= 32


@triton.jit(do_not_specialize=["page_stride", "splits", "common"])
def _decode(
    q_ptr, k_ptr, v_ptr, ks_ptr, vs_ptr, pages_ptr, lengths_ptr, first_ptr, members_ptr, tokens_ptr, before_ptr,
    out_ptr, partial_ptr, scale, page_stride, splits, common,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, S: tl.constexpr, BLOCK_N: tl.constexpr, MEMBERS: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The first `common` pieces are of what a group shares, longer ones as a rule; the `splits` after them of a
    sequence's own keys."""
    let_next_start(DEPENDENT)
    await_inputs(DEPENDENT)
    h, b, piece = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    if piece >= common:
        length = tl.load(lengths_ptr + b).to(tl.int32)
        begin = _whole_blocks(before_ptr + b, BLOCK_N, EXACT) if before_ptr is not None else 0
        visible = 0
        if WINDOW:
            visible = tl.maximum(length - WINDOW, 0)
            begin = tl.maximum(begin, visible // BLOCK_N * BLOCK_N)
        share = tl.cdiv(tl.cdiv(length - begin, BLOCK_N), splits) * BLOCK_N
        low = begin + (piece - common) * share
        high = tl.minimum(length, low + share)
        _decode_piece(
            q_ptr, k_ptr, v_ptr, ks_ptr, vs_ptr, pages_ptr + b * page_stride, out_ptr, partial_ptr, scale, b, 1, h,
            low, high, visible, piece, splits + common, H, G, D, S, BLOCK_N, 1, PRECISION, EXACT,
        )  # fmt: skip
    elif members_ptr is not None:
        members = tl.load(members_ptr + b).to(tl.int32)
        if members > 0:
            first, tokens = tl.load(first_ptr + b), _whole_blocks(tokens_ptr + b, BLOCK_N, EXACT)
            share = tl.cdiv(tl.cdiv(tokens, BLOCK_N), common) * BLOCK_N
            low = piece * share
            _decode_piece(
                q_ptr, k_ptr, v_ptr, ks_ptr, vs_ptr, pages_ptr + first * page_stride, None, partial_ptr, scale, first,
                members, h, low, tl.minimum(tokens, low + share), 0, piece, splits + common, H, G, D, S, BLOCK_N,
                MEMBERS, PRECISION, EXACT,
            )  # fmt: skip


@triton.jit
def _whole_blocks(tokens_ptr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr):
    """How many tokens are read for all who share them: if exact, nobody else's block may begin within one."""
    tokens = tl.load(tokens_ptr).to(tl.int32)
    return tokens // BLOCK_N * BLOCK_N if EXACT else tokens


@triton.jit
def _decode_piece(
    q_ptr, k_ptr, v_ptr, ks_ptr, vs_ptr, pages_ptr, out_ptr, partial_ptr, scale, b, members, h, low, high, visible,
    piece, pieces, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, S: tl.constexpr, BLOCK_N: tl.constexpr,
    MEMBERS: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The queries of up to MEMBERS sequences, from the b-th on, over keys low to high of the same pages. What the only
    piece finds is the result."""
    ROWS: tl.constexpr = num_rows(MEMBERS * G)
    r, d, n = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, BLOCK_N)
    query_rows = ((b + r // G) * H + h) * G + r % G
    mine = (r // G) < members
    q = _queries(q_ptr, k_ptr, query_rows * D, mine, D)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], sum_type(EXACT))
    acc = _zeros_like(q, EXACT)
    for start in range(low, high, BLOCK_N):
        place = start + n
        seen = (place < high) & (place >= visible)
        page = tl.load(pages_ptr + place // S, mask=place < high, other=0).to(tl.int64)
        row, scales = (page * S + place % S) * H + h, (page * H + h) * S + place % S
        top, mass, acc = _add_block(
            q, k_ptr, v_ptr, ks_ptr, vs_ptr, row, scales, seen, seen[None, :], scale, top, mass, acc, D, PRECISION,
            EXACT,
        )  # fmt: skip

    sums = _joined(acc, D)
    if out_ptr is not None and pieces == 1:
        mean = sums.to(tl.float32) / mass.to(tl.float32)[:, None]
        tl.store(out_ptr + query_rows[:, None] * D + d, mean.to(out_ptr.dtype.element_ty), mask=mine[:, None])
    else:
        rows = (piece.to(tl.int64) * tl.num_programs(1) * H * G + query_rows) * (D + 2)
        if low < high:  # of an empty piece nobody reads the sum
            tl.store(partial_ptr + rows[:, None] + d, sums, mask=mine[:, None])
        tl.store(partial_ptr + rows + D, top, mask=mine)
        tl.store(partial_ptr + rows + D + 1, mass, mask=mine)


@triton.jit
def _queries(q_ptr, k_ptr, row, mine, D: tl.constexpr):
    """Those that begin at `row`, whole or in halves: a tuple of one or two. So is what is computed from them."""
    if in_pairs(k_ptr.dtype.element_ty, q_ptr.dtype.element_ty, D):
        place = row[:, None] + 2 * tl.arange(0, D // 2)
        even = tl.load(q_ptr + place, mask=mine[:, None], other=0.0)
        parts = even, tl.load(q_ptr + place + 1, mask=mine[:, None], other=0.0)
    else:
        parts = (tl.load(q_ptr + row[:, None] + tl.arange(0, D), mask=mine[:, None], other=0.0),)
    return parts


@triton.constexpr_function
def sum_type(exact: bool) -> tl.dtype:
    """Of what is added up block by block."""
    return tl.float64 if exact else tl.float32


@triton.jit
def _zeros_like(parts, EXACT: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(len(parts)):
        zeros = zeros + (tl.zeros(parts[0].shape, sum_type(EXACT)),)  # noqa: RUF005 - Triton has no starred expressions
    return zeros


@triton.jit
def _joined(parts, D: tl.constexpr):
    return tl.reshape(tl.join(parts[0], parts[1]), (parts[0].shape[0], D)) if len(parts) == 2 else parts[0]


@triton.jit
def _add_block(
    q, k_ptr, v_ptr, ks_ptr, vs_ptr, row, scales, there, seen, scale, top, mass, acc, D: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Running largest score, mass and sums of values, with a block of keys more: those rows of the cache."""
    k = _load(k_ptr, row, there, q[0].dtype, D)
    scores = tl.dot(q[0], k[0].T, input_precision=PRECISION)
    for half in tl.static_range(1, len(q)):
        scores = tl.dot(q[half], k[half].T, scores, input_precision=PRECISION)
    scores *= scale
    if ks_ptr is not None:
        scores *= tl.load(ks_ptr + scales, mask=there, other=0.0)[None, :]
    if EXACT:
        scores = (scores + GRID) - GRID
    scores = tl.where(seen, scores, float("-inf"))
    larger = tl.maximum(top, tl.ceil(tl.max(scores, 1)))
    shift = tl.where(larger == float("-inf"), 0.0, larger)
    weight = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(top - shift).to(sum_type(EXACT))
    v = _load(v_ptr, row, there, q[0].dtype, D)
    if vs_ptr is None:
        weight = weight.to(v[0].dtype)
    mass = mass * fade + tl.sum(weight.to(sum_type(EXACT)), 1)
    if vs_ptr is not None:
        weight = (weight * tl.load(vs_ptr + scales, mask=there, other=0.0)[None, :]).to(v[0].dtype)
    sums = ()
    for half in tl.static_range(len(q)):
        added = tl.dot(weight, v[half], input_precision=PRECISION)
        sums = sums + (acc[half] * fade[:, None] + added.to(sum_type(EXACT)),)  # noqa: RUF005 - as above
    return larger, mass, sums


@triton.jit
def _load(memory_ptr, row, there, kind: tl.constexpr, D: tl.constexpr):
    """Rows of the cache, whole or in halves."""
    if in_pairs(memory_ptr.dtype.element_ty, kind, D):
        place = row[:, None] * (D // 2) + tl.arange(0, D // 2)
        pairs = tl.load(memory_ptr.to(tl.pointer_type(tl.int16)) + place, mask=there[:, None], other=0)
        parts = tl.inline_asm_elementwise(
            FROM_E4M3, "=&r,=&r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        place = row[:, None] * D + tl.arange(0, D)
        parts = (tl.load(memory_ptr + place, mask=there[:, None], other=0.0).to(kind),)
    return parts


@triton.jit(do_not_specialize=["pieces"])
def _combine(
    partial_ptr, out_ptr, pieces, D: tl.constexpr, MOST: tl.constexpr, FEW: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """Sums the pieces of one query: each has its own largest score (a power of two, by its exponent) and mass."""
    let_next_start(DEPENDENT)
    await_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    first = partial_ptr + row * (D + 2)
    stride = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * (D + 2)
    s, few, d = tl.arange(0, MOST), tl.arange(0, FEW), tl.arange(0, D)
    sums = _few_sums(first, stride, few, pieces, d)  # under way while the scores are looked at
    tops = tl.load(first + s * stride + D, mask=s < pieces, other=float("-inf"))
    masses = tl.load(first + s * stride + D + 1, mask=s < pieces, other=0.0)
    top = tl.max(tops, 0)
    mass = tl.sum(_two_to_the(tops - top) * masses, 0)
    acc = _weighted(first, stride, few, pieces, sums, top, D)
    for begin in range(FEW, pieces, FEW):
        sums = _few_sums(first, stride, begin + few, pieces, d)
        acc += _weighted(first, stride, begin + few, pieces, sums, top, D)
    value = acc.to(tl.float32) / mass.to(tl.float32)
    tl.store(out_ptr + row * D + d, value.to(out_ptr.dtype.element_ty))


@triton.jit
def _few_sums(first, stride, few, pieces, d):
    return tl.load(first + (few * stride)[:, None] + d, mask=(few < pieces)[:, None], other=0.0)


@triton.jit
def _weighted(first, stride, few, pieces, sums, top, D: tl.constexpr):
    """What some pieces add. Whatever lies where an empty one's sum would be is left out."""
    weight = _two_to_the(tl.load(first + few * stride + D, mask=few < pieces, other=float("-inf")) - top)[:, None]
    return tl.sum(weight * tl.where(weight > 0, sums, 0.0), 0)


@triton.jit
def _two_to_the(exponent):
    """Of whole numbers, which float32 holds as well as float64, and powers of which are exact."""
    return tl.exp2(exponent.to(tl.float32)).to(exponent.dtype)


@triton.jit(  # a step's sequences lie anywhere among those of its other segment: nothing is compiled anew for that
    do_not_specialize=["num_queries", "page_stride"],
    do_not_specialize_on_alignment=["pages_ptr", "start_ptr", "count_ptr"],
)
def _prefill(
    q_ptr, k_ptr, v_ptr, ks_ptr, vs_ptr, pages_ptr, first_ptr, start_ptr, count_ptr, out_ptr, lse_ptr,
    num_queries, scale, page_stride,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    block, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    count = tl.load(count_ptr + b).to(tl.int32)
    begin = block * BLOCK_M
    if begin < count:
        start, first = tl.load(start_ptr + b).to(tl.int32), tl.load(first_ptr + b).to(tl.int64)
        m, d, n = begin + tl.arange(0, BLOCK_M), tl.arange(0, D), tl.arange(0, BLOCK_N)
        query_rows = ((first + m) * HQ + head) * D
        q = _queries(q_ptr, k_ptr, query_rows, m < count, D)
        position = start + m
        high = start + tl.minimum(begin + BLOCK_M, count)
        low = 0
        if WINDOW:
            low = tl.maximum(start + begin - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        mass = tl.zeros([BLOCK_M], sum_type(EXACT))
        acc = _zeros_like(q, EXACT)
        for begin_n in range(low, high, BLOCK_N):
            place = begin_n + n
            page = tl.load(pages_ptr + b * page_stride + place // S, mask=place < high, other=0).to(tl.int64)
            h = head // (HQ // H)
            row, scales = (page * S + place % S) * H + h, (page * H + h) * S + place % S
            seen = place[None, :] <= position[:, None]
            if WINDOW:
                seen = seen & (place[None, :] > position[:, None] - WINDOW)
            top, mass, acc = _add_block(
                q, k_ptr, v_ptr, ks_ptr, vs_ptr, row, scales, place < high, seen, scale, top, mass, acc, D, PRECISION,
                EXACT,
            )  # fmt: skip
        mass = tl.where(mass > 0, mass, 1.0).to(tl.float32)  # a padded query may see no key of its window
        sums = _joined(acc, D).to(tl.float32) / mass[:, None]
        tl.store(out_ptr + query_rows[:, None] + d, sums.to(out_ptr.dtype.element_ty), mask=(m < count)[:, None])
        if lse_ptr is not None:
            row = head.to(tl.int64) * num_queries + first + m
            tl.store(lse_ptr + row, (top + tl.log2(mass)) * LN2, mask=m < count)
