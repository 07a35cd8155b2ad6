"""The input of a low-bit product: what it is encoded in, and inputs that the kernel which made them has encoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Input: TypeAlias = tuple[Tensor, ...]
"""Rows [N, in] as the product takes them: (codes, scales), or (x,) where inputs stay in the compute dtype."""


@dataclass(frozen=True, slots=True)
class InputCode:
    """8-bit codes with a float32 scale per row or, `grouped`, per 128 values of a row."""

    kind: Literal["int8", "fp8"]
    grouped: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self.kind == "int8" else torch.float8_e4m3fn

    @property
    def quantizer(self) -> str:
        """What makes them, by its name in `kernels/reference.py`, which defines it."""
        return f"quantize_{'groups' if self.grouped else 'rows'}_{self.kind}"

    @property
    def dequantizer(self) -> str:
        return f"dequantize_{'groups' if self.grouped else 'rows'}"


@dataclass(frozen=True, slots=True)
class EncodedInput:
    """In place of a tensor that only low-bit products read: its codes, left by the kernel that computed its values.

    The same codes as of the tensor: values are rounded to its dtype before they are encoded.
    """

    rows: Input
    code: InputCode
    shape: torch.Size  # of the tensor
    dtype: torch.dtype  # of the tensor


Rows: TypeAlias = Tensor | EncodedInput


def checked(rows: Input) -> Input:
    """ValueError for scales that show NaN or inf, on a CPU: on a GPU asking would stall it."""
    scales = rows[-1]
    if scales.device.type == "cpu" and not torch.isfinite(scales).all():
        raise ValueError("cannot quantize activations that hold NaN or inf: the model has diverged")
    return rows
