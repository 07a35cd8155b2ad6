"""Linear layers when a step decodes few sequences.

On an x86 CPU PyTorch hands float32 products to MKL, which takes longer than oneDNN for large weights and 8 to 128
rows. oneDNN is asked directly here, by the operator that torch.compile uses for it. On an Arm CPU a product takes less
time with the weights as the left one of the two matrices, up to 64 rows; the library fills these up to a multiple of
16, which must not be much more. (Measured on a Neoverse-N1.)

On a Hopper GPU a kernel of our own runs bfloat16 products of few rows without bias, which reads weights while what
comes before it still ends. Only in steps that are captured: to launch it takes the host longer than the library.
"""

from __future__ import annotations

import platform
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.models import kernels
from lockstep.quant.kernels.counters import Counters, counted_by

ROWS = range(8, 129)
ROWS_ON_ARM, MOST_MISSING = range(10, 65), 6  # to a multiple of sixteen
LEAST_WEIGHTS = 2**20

# Rows, and how many weights at most, of products with which an H200 takes less time for the blocks of a model if they
# are our kernel's. (With many weights it takes longer for 33 rows than for 64; why is not known.)
FEW_ROWS = ((range(1, 33), 2**63), (range(33, 129), 2**23), (range(48, 65), 2**27))

Linear = Callable[..., Tensor]  # of (input, weight, bias)


class _Thread(threading.local):
    captures = False


_thread = _Thread()


@contextmanager
def for_capture(counters: Counters) -> Iterator[None]:
    """What this thread runs in here is captured, or gets ready for that. `counters` must live as long as the graph."""
    before, _thread.captures = _thread.captures, True
    try:
        with counted_by(counters):
            yield
    finally:
        _thread.captures = before


def speed_up_few_rows(view: nn.Module) -> None:
    """Does nothing where it was not measured to pay."""
    for part in view.modules():
        if type(part) is nn.Linear and (linear := linear_function(part.weight)) is not F.linear:
            part.forward = partial(_forward, part, linear)


def linear_function(weight: Tensor) -> Linear:
    """`F.linear`, or what takes less time with such a weight."""
    if weight.numel() < LEAST_WEIGHTS:
        return F.linear
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        if torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available():
            return _by_onednn
        return _weights_first if (sys.platform, platform.machine()) == ("linux", "aarch64") else F.linear
    return _streamed if _streams(weight) else F.linear


def _forward(self: nn.Linear, linear: Linear, input: Tensor) -> Tensor:
    return linear(input, self.weight, self.bias)


def _by_onednn(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if input.numel() // input.shape[-1] not in ROWS:
        return F.linear(input, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


def _weights_first(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = input.reshape(-1, input.shape[-1])
    if len(rows) not in ROWS_ON_ARM or -len(rows) % 16 > MOST_MISSING:
        return F.linear(input, weight, bias)
    y = torch.mm(weight, rows.T).T.contiguous()
    return (y if bias is None else y.add_(bias)).view(*input.shape[:-1], len(weight))


def _streams(weight: Tensor) -> bool:
    """Copies want rows, of weights and of results, that begin at multiples of 16 bytes."""
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16 or not kernels.available(weight.device):
        return False
    from lockstep.quant.kernels.triton_tiles import WARP_GROUPS

    aligned = weight.data_ptr() % 16 == 0 and len(weight) % 8 == 0 and weight.shape[1] % 8 == 0
    return WARP_GROUPS and weight.is_contiguous() and aligned


def pays(num_rows: int, weight: Tensor) -> bool:
    """Whether our kernel takes less time."""
    return any(num_rows in rows and weight.numel() <= weights for rows, weights in FEW_ROWS)


def _streamed(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    from lockstep.models.kernels import few_rows  # Gluon is experimental: nobody else depends on it

    rows = input.reshape(-1, input.shape[-1])
    if not _thread.captures or bias is not None or not pays(len(rows), weight):
        return F.linear(input, weight, bias)
    return few_rows.linear(rows, weight).view(*input.shape[:-1], len(weight))
