"""Which kernel runs what, in one place.

An operation is named like its definition in `reference.py`: `int8_matmul`, `w4a16_matmul`, … A kernel takes the tensors
of the input, those of the weight and the dtype of the result. With the prefix `grouped_` the weight is [E, ...] and
`offsets` [E + 1] (int32), which come after the input, say which rows each expert has. To add a kernel, add a line to
CANDIDATES; tests/parity/test_formats.py then holds it against the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lockstep.quant.kernels import cpu

Condition = Callable[[Sequence[int], torch.dtype], bool]  # of the weight's shape [..., N, K] and the result's dtype


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str  # "cpu.int8_matmul_integer", for the audit
    run: Callable[..., Tensor]


def _always(shape: Sequence[int], dtype: torch.dtype) -> bool:
    return True


def _int8_dot(shape: Sequence[int], dtype: torch.dtype) -> bool:
    return cpu.has_int8_dot()


def _aligned(shape: Sequence[int], dtype: torch.dtype) -> bool:
    return shape[-1] % 16 == 0 and shape[-2] % 16 == 0


def _aligned_bfloat16(shape: Sequence[int], dtype: torch.dtype) -> bool:
    return _aligned(shape, dtype) and dtype == torch.bfloat16


# The first candidate whose condition holds runs; the reference where none does. No condition sees the number of rows:
# a row's arithmetic must not depend on how many others share its batch.
CANDIDATES: Mapping[str, Mapping[str, Sequence[tuple[str, Condition]]]] = {
    "cpu": {
        "int8_matmul": [("cpu.int8_matmul_integer", _int8_dot), ("cpu.int8_matmul_float", _always)],
        "fp8_matmul": [("cpu.fp8_matmul", _always)],
        "fp8_block_matmul": [("cpu.fp8_block_matmul", _always)],
        "w4a16_matmul": [("cpu.w4a16_matmul", _always)],
        "w4a8_matmul": [("cpu.w4a8_matmul_integer", _int8_dot), ("cpu.w4a8_matmul_float", _always)],
        "w4a8_fp8_matmul": [("cpu.w4a8_matmul_fp8", _always)],
    },
    "cuda": {
        "int8_matmul": [("cuda.int8_matmul", _aligned)],
        "fp8_matmul": [("cuda.fp8_matmul", _aligned_bfloat16)],
        "w4a16_matmul": [("cuda.w4a16_matmul", _always)],
    },
}


@cache
def choose(operation: str, device: str, shape: tuple[int, ...], dtype: torch.dtype) -> Kernel:
    """What runs `operation` on a weight of `shape` on devices of the type `device`."""
    for name, condition in CANDIDATES.get(device, {}).get(operation, ()):
        if condition(shape, dtype):
            return Kernel(name, _function(name))
    if operation.startswith("grouped_"):
        return _expert_by_expert(choose(operation.removeprefix("grouped_"), device, shape, dtype))
    name = f"reference.{operation}"
    return Kernel(name, _function(name))


def _function(name: str) -> Callable[..., Tensor]:
    module, _, function = name.rpartition(".")
    return getattr(import_module(f"{__name__}.{module}"), function)


def _expert_by_expert(kernel: Kernel) -> Kernel:
    """The grouped product as one product per expert that has rows. On CUDA it waits for the offsets."""

    def run(*arguments: Any) -> Tensor:
        *x, offsets, codes, scales, dtype = arguments
        y = x[0].new_zeros(len(x[0]), codes.shape[1], dtype=dtype)
        bounds = offsets.tolist()
        for expert, (start, end) in enumerate(pairwise(bounds)):
            if start < end:
                rows = (tensor[start:end] for tensor in x)
                y[start:end] = kernel.run(*rows, codes[expert], scales[expert], dtype)
        return y

    return Kernel(f"{kernel.name} per expert", run)
