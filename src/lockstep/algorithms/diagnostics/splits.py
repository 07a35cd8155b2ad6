"""Which tokens a figure is about: by weight-version lag, place in the answer, sign of A and old probability.

A *cell* is one bucket of one split. Every sampled token lies in exactly one cell of each split, so the cells of any
split add up to the whole. A cell is named after its lower bound (`pos64`: 64 to 127); the last one is open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lockstep.metrics import LENGTHS, PARTS
from lockstep.types import Batch


@dataclass(frozen=True, slots=True)
class Split:
    cells: tuple[str, ...]
    bounds: tuple[float, ...]  # the lower bounds of all cells but the first

    def bucket(self, x: Tensor) -> Tensor:
        """The cell's number for every value."""
        return torch.bucketize(x, constant(self.bounds, x.device), right=True)


def _by_bound(name: str, bounds: Sequence[float]) -> Split:
    return Split(tuple(f"{name}{bound:g}" for bound in bounds), tuple(bounds[1:]))


_BOUNDS = {part.name: part.bounds for part in PARTS}

LAG = _by_bound("lag", _BOUNDS["lag*"])
POSITION = _by_bound("pos", _BOUNDS["pos*"])  # sampled tokens of the same sequence before this one
ADVANTAGE = Split(("adv_neg", "adv_zero", "adv_pos"), (0, 1))  # of the sign
PROBABILITY = _by_bound("prob", _BOUNDS["prob*"])  # π_prox: what QaRL's Figs. 4 and 5 call old
LENGTH = _by_bound("len", LENGTHS)  # sampled tokens of a sequence

SPLITS = (LAG, POSITION, ADVANTAGE, PROBABILITY)
CELLS = tuple(cell for split in SPLITS for cell in split.cells)


@cache
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Copied to the device once: a copy in every step would be a wait in every step."""
    return torch.tensor(values, dtype=torch.float64, device=device)


def token_cells(batch: Batch, places: Tensor) -> Tensor:
    """[splits, M]: the cell in `CELLS` of every sampled token, which `places` [M] lists."""
    traits = (batch.lag, _rank(batch), batch.advantage.sign(), batch.logp_prox.double().exp())
    rows, first = [], 0
    for split, trait in zip(SPLITS, traits, strict=True):
        rows.append(split.bucket(trait[places]) + first)
        first += len(split.cells)
    return torch.stack(rows)


def _rank(batch: Batch) -> Tensor:
    """[N]: how many tokens of its sequence were sampled before this one."""
    before = batch.mask.cumsum(0) - batch.mask.long()
    return before - before[batch.cu_seqlens[:-1].long()][batch.seq]


def sum_by_cell(x: Tensor, cells: Tensor, num: int) -> Tensor:
    """[F, num]: each row of x [F, M] summed over the tokens of each cell [S, M], as one product with the indicators."""
    return x @ torch.zeros(x.shape[1], num, dtype=x.dtype, device=x.device).scatter_(1, cells.T, 1.0)


def max_by_cell(x: Tensor, cells: Tensor, num: int) -> Tensor:
    """[F, num]: the largest of each row of x [F, M], none below zero, over the tokens of each cell [S, M]."""
    zeros = torch.zeros(len(x), num, dtype=x.dtype, device=x.device)
    return zeros.scatter_reduce(1, cells.flatten().expand(len(x), -1), x.repeat(1, len(cells)), "amax")
