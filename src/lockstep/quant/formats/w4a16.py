"""int4 weights in groups of 128 inputs, inputs in the compute dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lockstep.quant.encoded import Encoded
from lockstep.quant.format import Format, Input, checked_weight
from lockstep.quant.kernels import decode
from lockstep.quant.kernels.reference import pack_int4, quantize_groups_int4


@dataclass(frozen=True, slots=True)
class W4A16(Format):
    """q = round(w / s) within ±7, s = max(absmax / 7, 1e-5) of a group;  y = Σ x·(q·s), q·s rounded to x's dtype.

    Inputs have no codes, so NaN in them is not refused: it comes out as NaN, as in any linear layer.
    """

    bits: ClassVar[int] = 4

    @property
    def operation(self) -> str:
        return "w4a16_matmul"

    def quantize(self, weight: Tensor) -> Encoded:
        codes, scales = quantize_groups_int4(weight)
        return checked_weight(weight, pack_int4(codes), scales)

    def dequantize(self, weight: Encoded, dtype: torch.dtype) -> Tensor:
        return decode("dequantize_int4", weight.codes, weight.scales, weight.shape[-1], dtype)

    def encode_input(self, x: Tensor) -> Input:
        return (x,)

    def decode_input(self, x: Input, dtype: torch.dtype) -> Tensor:
        return x[0].to(dtype)
