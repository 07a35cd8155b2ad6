"""Sequences end to end under a token budget. What goes together depends on the order of sequences, never on time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from lockstep.types import Batch, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One sequence as learning sees it, every field aligned with the token itself. Equal only to itself."""

    tokens: Tensor  # [T] int64
    mask: Tensor  # [T] bool, tokens to learn from; never the first, which nothing predicts
    logp_behav: Tensor  # [T] float32
    advantage: Tensor  # [T] float32
    lag: Tensor  # [T] int32
    temperature: float = 1.0
    logp_prox: Tensor | None = None  # [T] float32, None until the learner has scored it
    logp_ref: Tensor | None = None  # [T] float32, None until the reference has, or without one
    values: Tensor | None = None  # [T] float32
    returns: Tensor | None = None  # [T] float32
    routes: Tensor | None = None  # [T, MoE layers, top-k] expert ids; None: all routing is live
    routed: Tensor | None = None  # [T] bool, where there are routes: never at the last token, which nobody forwarded
    replayed: bool = True  # the routers follow `routes`; otherwise their own choice is only compared with it
    alone: bool = False  # no neighbour answers the same prompt, so nobody looks for a prefix they share

    def __len__(self) -> int:
        return len(self.tokens)


def row_of(trajectory: Trajectory, version: int) -> Row:
    """A trajectory for a learner at `version`, its advantage still zero."""
    if trajectory.mask[0]:
        raise ValueError(f"trajectory {trajectory.uid!r} has a sampled first token: nothing predicts it")
    mask, routes = trajectory.mask, trajectory.routes
    return Row(
        tokens=trajectory.tokens,
        mask=mask,
        logp_behav=trajectory.logp_behav,
        advantage=torch.zeros(len(mask)),
        lag=torch.where(mask, version - trajectory.versions, 0).int(),
        temperature=trajectory.temperature,
        routes=torch.cat([routes.ids, routes.ids.new_zeros(1, *routes.ids.shape[1:])]) if routes else None,
        routed=torch.cat([routes.versions >= 0, torch.tensor([False])]) if routes else None,
    )


def example_row(tokens: Tensor, mask: Tensor) -> Row:
    """A worked example to imitate: every masked token counts the same."""
    if mask[0]:
        raise ValueError("the first token of an example cannot be learned: nothing predicts it")
    zeros = torch.zeros(len(mask))
    return Row(tokens=tokens, mask=mask, logp_behav=zeros, advantage=mask.float(), lag=zeros.int(), alone=True)


class Packer:
    """Next-fit in the order rows come: `add` returns the micro-batch that a row has just closed, if it has.

    A row longer than the budget gets a micro-batch of its own; rows of different temperatures never share one.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._open: list[Row] = []
        self._tokens = 0

    def add(self, row: Row) -> list[Row] | None:
        full = self._tokens + len(row) > self.budget
        closed = self.flush() if self._open and (full or row.temperature != self._open[0].temperature) else None
        self._open.append(row)
        self._tokens += len(row)
        return closed

    def flush(self) -> list[Row]:
        """What is left, as one last micro-batch; empty if nothing is."""
        closed, self._open, self._tokens = self._open, [], 0
        return closed


def pack(rows: Iterable[Row], budget: int) -> list[list[Row]]:
    """Rows into micro-batches of at most `budget` tokens, in order."""
    packer = Packer(budget)
    closed = [full for row in rows if (full := packer.add(row))]
    rest = packer.flush()
    return [*closed, rest] if rest else closed


def collate(rows: Sequence[Row]) -> Batch:
    """One packed batch. Rows not yet scored get a zero `logp_prox`."""
    lengths = torch.tensor([len(row) for row in rows])
    logp_prox = _cat([row.logp_prox for row in rows])
    ends = lengths.cumsum(0)
    seq = torch.repeat_interleave(torch.arange(len(rows)), lengths)
    return Batch(
        tokens=torch.cat([row.tokens for row in rows]),
        positions=torch.arange(int(ends[-1])) - (ends - lengths)[seq],
        cu_seqlens=torch.cat([ends.new_zeros(1), ends]).int(),
        seq=seq,
        mask=torch.cat([row.mask for row in rows]),
        logp_behav=torch.cat([row.logp_behav for row in rows]),
        logp_prox=logp_prox if logp_prox is not None else torch.zeros(int(ends[-1])),
        advantage=torch.cat([row.advantage for row in rows]),
        lag=torch.cat([row.lag for row in rows]),
        temperature=rows[0].temperature,
        max_seqlen=int(lengths.max()),
        logp_ref=_cat([row.logp_ref for row in rows]),
        shared=shared_prefixes(rows),
        returns=_cat([row.returns for row in rows]),
        values=_cat([row.values for row in rows]),
        routes=_cat([row.routes for row in rows]),
        routed=_cat([row.routed for row in rows]),
        replayed=rows[0].replayed,
    )


def shared_prefixes(rows: Sequence[Row], worth: float = 0.1) -> Tensor | None:
    """Where the tokens that a row begins with were seen before: answers to one prompt share it, so it runs once.

    A token's activations depend on the tokens up to it and, where experts are replayed, on theirs, so sharing is exact.
    None if it would save too little.
    """
    if all(row.alone for row in rows):
        return None
    parts = [torch.arange(len(rows[0]))]
    offset = num_shared = 0
    for before, row in pairwise(rows):
        offset += len(before)
        num = _common_prefix(before, row)
        parts.append(torch.cat([parts[-1][:num], torch.arange(offset + num, offset + len(row))]))
        num_shared += num
    return torch.cat(parts) if num_shared > worth * (offset + len(rows[-1])) else None


def _common_prefix(a: Row, b: Row) -> int:
    """Leading tokens that are the same and go to the same experts."""
    num = _equal(a.tokens, b.tokens, min(len(a), len(b)))
    for x, y in ((a.routed, b.routed), (a.routes, b.routes)):
        if x is not None and y is not None:
            num = _equal(x, y, num)
    return num


def _equal(a: Tensor, b: Tensor, num: int) -> int:
    """How many of the first `num` rows are equal before one is not."""
    differ = (a[:num] != b[:num]).view(num, math.prod(a.shape[1:])).any(1)
    return int(differ.int().argmax()) if differ.any() else num


def _cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    assert len(present) in (0, len(parts)), "some rows of a micro-batch have the field and others lack it"
    return torch.cat(present) if present else None


def blank(row: Row) -> Row:
    """The first two tokens of a row with nothing to learn: what a rank without work forwards along with the others."""
    cut = {name: value[:2] for name in row.__slots__ if isinstance(value := getattr(row, name), Tensor)}
    return replace(row, **cut | {"mask": torch.zeros(2, dtype=torch.bool)})
