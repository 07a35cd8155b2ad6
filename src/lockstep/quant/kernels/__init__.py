"""Which kernel runs what, in one place.

An operation is named like its definition in `reference.py`. A product (`int8_matmul`, …) takes the tensors of the
input, those of the weight and the dtype of the result. Its form for experts has the prefix `grouped_`, weights [E, ...]
and, after the input, `offsets` [E + 1] (int32): which rows each expert has. `quantize_*` turn rows [..., K] into
codes and scales, `dequantize_*` turn them back. To add a kernel, add a line to CANDIDATES; the parity tests then hold
it against the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lockstep.quant.kernels import cpu

Condition: TypeAlias = Callable[[Sequence[int], torch.dtype], bool]
"""Whether a kernel can, by the weight's shape [..., N, K] (or the row's, to encode and decode it) and the dtype."""


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str  # "cpu.int8_matmul_integer", for the audit
    run: Callable[..., Any]


def _always(shape: Sequence[int], dtype: torch.dtype) -> bool:
    return True


def _int8_dot(shape: Sequence[int], dtype: torch.dtype) -> bool:
    return cpu.has_int8_dot() and shape[-1] > 1  # torch leaves the product over a single input uninitialised


def _aligned(shape: Sequence[int], dtype: torch.dtype) -> bool:
    return shape[-1] % 16 == 0 and shape[-2] % 16 == 0


def _aligned_bfloat16(shape: Sequence[int], dtype: torch.dtype) -> bool:
    return _aligned(shape, dtype) and dtype == torch.bfloat16


def _triton(shape: Sequence[int], dtype: torch.dtype) -> bool:
    return find_spec("triton") is not None


def _triton_half(shape: Sequence[int], dtype: torch.dtype) -> bool:
    return _triton(shape, dtype) and dtype in (torch.bfloat16, torch.float16)


# The first candidate whose condition holds runs; the reference where none does. No condition sees the number of rows:
# where it matters, a candidate itself sees to it that they change no result, or says by how much they do.
CANDIDATES: Mapping[str, Mapping[str, Sequence[tuple[str, Condition]]]] = {
    "cpu": {
        "int8_matmul": [("cpu.int8_matmul_integer", _int8_dot), ("cpu.int8_matmul_float", _always)],
        "fp8_matmul": [("cpu.fp8_matmul", _always)],
        "fp8_block_matmul": [("cpu.fp8_block_matmul", _always)],
        "w4a16_matmul": [("cpu.w4a16_matmul", _always)],
        "w4a8_matmul": [("cpu.w4a8_matmul_integer", _int8_dot), ("cpu.w4a8_matmul_float", _always)],
        "w4a8_fp8_matmul": [("cpu.w4a8_fp8_matmul", _always)],
        "dequantize_rows": [("cpu.dequantize_rows", _always)],
        "dequantize_groups": [("cpu.dequantize_groups", _always)],
        "dequantize_blocks": [("cpu.dequantize_blocks", _always)],
        "dequantize_int4": [("cpu.dequantize_int4", _always)],
    },
    "cuda": {
        "int8_matmul": [("triton_eight.int8_matmul", _triton), ("cuda.int8_matmul", _aligned)],
        "fp8_matmul": [("triton_eight.fp8_matmul", _triton), ("cuda.fp8_matmul", _aligned_bfloat16)],
        "fp8_block_matmul": [("triton_eight.fp8_block_matmul", _triton)],
        "w4a16_matmul": [("triton_four.w4a16_matmul", _triton_half), ("cuda.w4a16_matmul", _always)],
        "w4a8_matmul": [("triton_four.w4a8_matmul", _triton)],
        "w4a8_fp8_matmul": [("triton_four.w4a8_fp8_matmul", _triton)],
        "grouped_int8_matmul": [("triton_eight.grouped_int8_matmul", _triton)],
        "grouped_fp8_matmul": [("triton_eight.grouped_fp8_matmul", _triton)],
        "grouped_fp8_block_matmul": [("triton_eight.grouped_fp8_block_matmul", _triton)],
        "grouped_w4a16_matmul": [("triton_four.grouped_w4a16_matmul", _triton_half)],
        "grouped_w4a8_matmul": [("triton_four.grouped_w4a8_matmul", _triton)],
        "grouped_w4a8_fp8_matmul": [("triton_four.grouped_w4a8_fp8_matmul", _triton)],
        "quantize_rows_int8": [("triton_rows.quantize_rows_int8", _triton)],
        "quantize_rows_fp8": [("triton_rows.quantize_rows_fp8", _triton)],
        "quantize_groups_fp8": [("triton_rows.quantize_groups_fp8", _triton)],
        "quantize_blocks_fp8": [("triton_weights.quantize_blocks_fp8", _triton)],
        "quantize_int4": [("triton_weights.quantize_int4", _triton)],
        "dequantize_rows": [("triton_weights.dequantize_rows", _triton), ("cuda.dequantize_rows", _always)],
        "dequantize_groups": [("triton_weights.dequantize_groups", _triton)],
        "dequantize_blocks": [("triton_weights.dequantize_blocks", _triton)],
        "dequantize_int4": [("triton_weights.dequantize_int4", _triton), ("cuda.dequantize_int4", _always)],
    },
}


@cache
def choose(operation: str, device: str, shape: tuple[int, ...], dtype: torch.dtype) -> Kernel:
    """What runs `operation` on a weight of `shape` on devices of the type `device`."""
    for name, condition in CANDIDATES.get(device, {}).get(operation, ()):
        if condition(shape, dtype):
            return load(name)
    if operation.startswith("grouped_"):
        return _expert_by_expert(choose(operation.removeprefix("grouped_"), device, shape, dtype))
    return load(f"reference.{operation}")


def encode(operation: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows [..., K]."""
    return choose(operation, x.device.type, x.shape[-1:], x.dtype).run(x)


def decode(operation: str, codes: Tensor, scales: Tensor, *arguments: Any) -> Tensor:
    """codes·scales in the dtype that comes last in `arguments`."""
    return choose(operation, codes.device.type, codes.shape[-1:], arguments[-1]).run(codes, scales, *arguments)


def load(name: str) -> Kernel:
    """`module.function` of this folder. Imported when asked for: triton comes with torch for GPUs only."""
    module, _, function = name.rpartition(".")
    return Kernel(name, getattr(import_module(f"{__name__}.{module}"), function))


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
