"""Which tokens an update left out because their ratio had gone too far."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.algorithms.diagnostics.splits import CELLS, sum_by_cell, token_cells
from lockstep.algorithms.diagnostics.tally import Tally
from lockstep.types import Batch

CLIPPING = ("live", "clip_low", "clip_high")


@torch.no_grad()
def tally_clipping(tally: Tally, batch: Batch, places: Tensor, ratio: Tensor, gradient: Tensor, live: Tensor) -> None:
    """Once per token and update. A token is clipped if it has an advantage and a weight (`live`) but no gradient.

    This holds for whatever surrogate: none has to tell where its bounds are. `ratio` [N] is the one it clips, and says
    on which side the token has gone too far.
    """
    clipped = live & (gradient == 0)
    x = torch.stack([live, clipped & (ratio < 1), clipped & (ratio >= 1)])[:, places].double()
    tally.add("clipping", sum_by_cell(x, token_cells(batch, places), len(CELLS)))
