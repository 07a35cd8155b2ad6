"""What the device knows of each running sequence: its pages and how it is sampled, by row."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.rollout.sampler import SamplingTable
from lockstep.rollout.sequence import Sequence
from lockstep.rollout.transfer import send


class Rows:
    """Written when something changes, in one copy for all rows of a step. The row after the last belongs to nobody."""

    def __init__(self, max_seqs: int, max_pages: int, vocab: int, device: torch.device) -> None:
        self.nobody = max_seqs
        self.table = torch.zeros(max_seqs + 1, max_pages, dtype=torch.int64, device=device)
        self.sampling = SamplingTable(max_seqs + 1, vocab, device)
        self._written: list[tuple[int, int]] = [(-1, 0)] * max_seqs  # (seating, pages) of what each row holds

    def write(self, seqs: list[Sequence]) -> None:
        places: list[tuple[int, int, int]] = []  # (row, column, page)
        for seq in seqs:
            seating, num_known = self._written[seq.row]
            if seating != seq.seating:
                self.sampling.write(seq.row, seq.request.params)
                num_known = 0
            if num_known < len(seq.pages):  # pages only grow while a sequence holds its row
                places += [(seq.row, n, seq.pages[n]) for n in range(num_known, len(seq.pages))]
                self._written[seq.row] = (seq.seating, len(seq.pages))
        if places:
            rows, columns, pages = send([*zip(*places, strict=True)], self.table.device)
            self.table[rows, columns] = pages
        self.sampling.flush()

    def pages(self, rows: Tensor, num_pages: int | None = None) -> Tensor:
        """[rows, pages] page ids, the first `num_pages` of each."""
        return self.table[:, :num_pages].index_select(0, rows)
