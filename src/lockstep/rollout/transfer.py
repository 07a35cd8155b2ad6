"""Numbers on their way between host and device. Neither waits for what the other is busy with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def send(values: Sequence[object], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """To the device, behind what it is computing. (PyTorch would wait for that, were the memory not pinned.)"""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class Flight:
    """Results under way to the host: as they were when what was launched before is done."""

    def __init__(self, *results: Tensor) -> None:
        self._copies = [x.to("cpu", non_blocking=True, copy=True) for x in results]
        self._arrived = torch.cuda.Event() if results[0].is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def land(self) -> list[Tensor]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copies
