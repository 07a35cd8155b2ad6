"""What a step of a burst does before and after the model: rows are looked up, and moved on.

In torch, for every device. On a GPU these are some twenty launches, which `burst_kernels.py` does in two.

Shapes: B sequences of the burst, R rows of the engine, P pages of a row, E end tokens, S steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class State(NamedTuple):
    """Of the B sequences of a burst, between two steps: int64, [B] each, on the device."""

    rows: Tensor  # of the engine
    tokens: Tensor  # drawn last
    positions: Tensor  # of these
    last: Tensor  # where the last token may be that a sequence draws; one that is there idles
    step: Tensor  # how many were computed in this burst


class Places(NamedTuple):
    """What a step needs to know of them."""

    start: Tensor  # [B] positions; 0 of those that idle
    slots: Tensor  # [B] where keys and values go
    drawn: Tensor  # [B] positions of what is drawn
    ints: Tensor  # [3, B] of the sampling table
    floats: Tensor  # [3, B]
    pages: Tensor  # [B, P], of which those up to the position matter


def look_up(state: State, table: Tensor, ints: Tensor, floats: Tensor, page_size: int, idle_slot: int) -> Places:
    """`table` [R, P] of pages, `ints` and `floats` [3, R] of sampling parameters: by row of the engine."""
    rows, _, positions, last, _ = state
    alive, pages = positions < last, table.index_select(0, rows)
    own = pages.gather(1, (positions // page_size)[:, None])[:, 0] * page_size + positions % page_size
    return Places(
        start=positions * alive,
        slots=torch.where(alive, own, idle_slot),
        drawn=positions + 1,
        ints=ints.index_select(1, rows),
        floats=floats.index_select(1, rows),
        pages=pages,
    )


def move_on(state: State, drawn_B: Tensor, logp_B: Tensor, ends_E: Tensor, tokens_SB: Tensor, logps_SB: Tensor) -> None:
    """Writes down what was drawn, in the step's row of tokens and log-probs. An end token is its sequence's last."""
    _, tokens, positions, last, step = state
    tokens_SB[:, : len(drawn_B)].scatter_(0, step[None], drawn_B[None])
    logps_SB[:, : len(drawn_B)].scatter_(0, step[None], logp_B[None])
    step += 1
    tokens.copy_(drawn_B)
    positions += positions < last
    ended = (drawn_B[:, None] == ends_E).any(1)
    last.copy_(torch.where(ended, torch.minimum(positions, last), last))
