"""Numbers on their way between host and device. Neither waits for what the other is busy with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def send(values: Sequence[object], device: torch.device, dtype: type[np.generic] = np.int64) -> Tensor:
    """To the device, behind what it is computing. (PyTorch would wait for that, were the memory not pinned.)"""
    numbers = torch.from_numpy(np.array(values, dtype))  # of a long list faster than torch.tensor
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


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
