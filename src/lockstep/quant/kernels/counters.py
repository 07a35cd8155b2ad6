"""Counters with which parts of a product, computed by several programs, find out who comes last.

Products that run at the same time must not share them: results would be wrong, or a part would wait for ever. One
thread launches one after the other; but what it captures may be run at any time, so a capture brings its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MOST = 400  # that a launch uses: one for each tile, or three for each multiprocessor
Counters = dict[torch.device, Tensor]

_lasting: list[Tensor] = []  # all there are: a captured step uses its own for as long as it is run


class _Thread(threading.local):
    def __init__(self) -> None:
        self.counters: Counters = {}


_thread = _Thread()


@contextmanager
def counted_by(own: Counters) -> Iterator[None]:
    """What this thread launches in here counts by them."""
    before, _thread.counters = _thread.counters, own
    try:
        yield
    finally:
        _thread.counters = before


def counters(device: torch.device) -> Tensor:
    """Zeros that each launch leaves as zeros."""
    own = _thread.counters
    if device not in own:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("run a product of this kind once before capturing it in a CUDA graph")
        own[device] = torch.zeros(MOST, dtype=torch.int32, device=device)
        _lasting.append(own[device])
    return own[device]
