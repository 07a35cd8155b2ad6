"""Numbers on their way between host and device. Neither waits for what the other is busy with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def send(values: Sequence[object] | Tensor, device: torch.device, dtype: type[np.generic] = np.int64) -> Tensor:
    """To the device, behind what it is computing. (PyTorch would wait for that, were the memory not pinned.)"""
    numbers = values if isinstance(values, Tensor) else torch.from_numpy(np.array(values, dtype))  # fast for long lists
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


class Flight:
    """Results under way to the host: as they were when what was launched before is done."""

    def __init__(self, *results: Tensor) -> None:
        self._copies = [x.to("cpu", non_blocking=True, copy=True) for x in results]
        device = results[0].device
        self._arrived = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def land(self) -> list[Tensor]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copies
