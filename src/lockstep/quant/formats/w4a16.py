"""int4 weights in groups of 128 inputs, inputs in the compute dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lockstep.quant.encoded import Encoded
from lockstep.quant.format import Format
from lockstep.quant.kernels import decode, encode
from lockstep.quant.scheme import INT4, Scheme


@dataclass(frozen=True, slots=True)
class W4A16(Format):
    """q = round(w / s) within ±7, s = max(absmax / 7, 1e-5) of a group, rounded to bfloat16;  y = Σ x·(q·s).

    q·s is rounded to the dtype of x, once: with such a scale it is exact in float32.

    Inputs have no codes, so NaN in them is not refused: it comes out as NaN, as in any linear layer.
    """

    bits: ClassVar[int] = 4

    @property
    def operation(self) -> str:
        return "w4a16_matmul"

    @property
    def input_code(self) -> None:
        return None

    @property
    def scheme(self) -> Scheme:
        return Scheme("pack-quantized", INT4, None, readable_experts=True)

    def encode_weight(self, weight: Tensor) -> Encoded:
        return Encoded(*encode("quantize_int4", weight), tuple(weight.shape))

    def dequantize(self, weight: Encoded, dtype: torch.dtype) -> Tensor:
        return decode("dequantize_int4", weight.codes, weight.scales, weight.shape[-1], dtype)
