"""Linear layers on a CPU when a step decodes few sequences.

PyTorch hands float32 products to MKL, which takes longer than oneDNN for large weights and 8 to 128 rows. oneDNN is
asked directly here, by the operator that torch.compile uses for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = range(8, 129)
LEAST_WEIGHTS = 2**20


def speed_up_few_rows(view: nn.Module) -> None:
    """Does nothing where it was not measured to pay."""
    for part in view.modules():
        if type(part) is nn.Linear and _pays(part.weight):
            part.forward = partial(_forward, part)


def linear_function(weight: Tensor) -> Callable[..., Tensor]:
    """`F.linear`, or what takes less time with such a weight."""
    return _linear if _pays(weight) else F.linear


def _pays(weight: Tensor) -> bool:
    float32_on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    both_there = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return float32_on_cpu and weight.numel() >= LEAST_WEIGHTS and both_there


def _forward(self: nn.Linear, input: Tensor) -> Tensor:
    return _linear(input, self.weight, self.bias)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if input.numel() // input.shape[-1] not in ROWS:
        return F.linear(input, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
