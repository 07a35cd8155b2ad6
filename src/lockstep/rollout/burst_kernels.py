"""The functions of `burst_state.py`, one Triton kernel each."""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lockstep.quant.kernels.triton_tiles import DEPENDENT, await_inputs, cdiv, let_next_start, power_of_2
from lockstep.rollout.burst_state import Places, State


def look_up(state: State, table: Tensor, ints: Tensor, floats: Tensor, page_size: int, idle_slot: int) -> Places:
    size, num_pages = len(state.rows), table.shape[1]
    start, slots, drawn = table.new_empty(3, size)
    parameters = ints.new_empty(3, size), floats.new_empty(3, size)
    places = Places(start, slots, drawn, *parameters, table.new_empty(size, num_pages))
    _look_up[(size,)](
        state.rows, state.positions, state.last, table, ints, floats, *places, size, num_pages, ints.shape[1],
        idle_slot, S=page_size, BLOCK=512, DEPENDENT=DEPENDENT, launch_pdl=DEPENDENT, num_warps=2,
    )  # fmt: skip
    return places


def move_on(state: State, drawn_B: Tensor, logp_B: Tensor, ends_E: Tensor, tokens_SB: Tensor, logps_SB: Tensor) -> None:
    size, block, ends = len(drawn_B), 128, len(ends_E)
    _move_on[(cdiv(size, block),)](
        *state[1:], drawn_B, logp_B, ends_E, tokens_SB, logps_SB, size, ends, tokens_SB.stride(0), BLOCK=block,
        ENDS=power_of_2(ends), DEPENDENT=DEPENDENT, launch_pdl=DEPENDENT, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["size", "num_pages", "num_rows", "idle_slot"])
def _look_up(
    rows_ptr, positions_ptr, last_ptr, table_ptr, ints_ptr, floats_ptr, start_ptr, slots_ptr, drawn_ptr, ints_out_ptr,
    floats_out_ptr, pages_ptr, size, num_pages, num_rows, idle_slot,
    S: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_start(DEPENDENT)
    await_inputs(DEPENDENT)
    b, p, kind = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, 4)
    row, position = tl.load(rows_ptr + b), tl.load(positions_ptr + b)
    alive = position < tl.load(last_ptr + b)
    pages = table_ptr + row * num_pages
    slot = tl.load(pages + position // S) * S + position % S
    tl.store(start_ptr + b, tl.where(alive, position, 0))
    tl.store(slots_ptr + b, tl.where(alive, slot, idle_slot))
    tl.store(drawn_ptr + b, position + 1)
    ints = tl.load(ints_ptr + kind * num_rows + row, mask=kind < 3)
    tl.store(ints_out_ptr + kind * size + b, ints, mask=kind < 3)
    floats = tl.load(floats_ptr + kind * num_rows + row, mask=kind < 3)
    tl.store(floats_out_ptr + kind * size + b, floats, mask=kind < 3)
    for first in range(0, num_pages, BLOCK):  # of those that idle, too: they may lead a group. Elsewhere page 0
        held = tl.load(pages + first + p, mask=first + p <= position // S, other=0)
        tl.store(pages_ptr + b * num_pages + first + p, held, mask=first + p < num_pages)


@triton.jit(do_not_specialize=["size", "ends", "stride"])
def _move_on(
    state_tokens_ptr, positions_ptr, last_ptr, step_ptr, drawn_ptr, logp_ptr, ends_ptr, tokens_ptr, logps_ptr, size,
    ends, stride, BLOCK: tl.constexpr, ENDS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_start(DEPENDENT)
    await_inputs(DEPENDENT)
    b, e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ENDS)
    there = b < size
    token, step = tl.load(drawn_ptr + b, mask=there), tl.load(step_ptr + b, mask=there)
    tl.store(tokens_ptr + step * stride + b, token, mask=there)
    tl.store(logps_ptr + step * stride + b, tl.load(logp_ptr + b, mask=there), mask=there)
    tl.store(step_ptr + b, step + 1, mask=there)
    tl.store(state_tokens_ptr + b, token, mask=there)

    position, last = tl.load(positions_ptr + b, mask=there), tl.load(last_ptr + b, mask=there)
    position += position < last
    is_end = token[:, None] == tl.load(ends_ptr + e, mask=e < ends, other=-1)[None, :]
    ended = tl.max(is_end.to(tl.int32), 1) > 0
    tl.store(positions_ptr + b, position, mask=there)
    tl.store(last_ptr + b, tl.where(ended, tl.minimum(position, last), last), mask=there)
