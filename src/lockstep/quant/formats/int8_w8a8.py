"""int8 weights per output channel, int8 inputs per token, exact integer sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lockstep.quant.encoded import Encoded
from lockstep.quant.format import Format
from lockstep.quant.inputs import InputCode
from lockstep.quant.kernels import decode, encode
from lockstep.quant.scheme import INT8, PER_CHANNEL, PER_TOKEN, Scheme


@dataclass(frozen=True, slots=True)
class INT8W8A8(Format):
    """q = round(x / s) within ±127, s = absmax / 127;  y = (Σ q_x·q_w · s_x)·s_w."""

    bits: ClassVar[int] = 8

    @property
    def operation(self) -> str:
        return "int8_matmul"

    @property
    def input_code(self) -> InputCode:
        return InputCode("int8")

    @property
    def batch_invariant(self) -> bool:
        return True

    @property
    def scheme(self) -> Scheme:
        return Scheme("int-quantized", INT8 | PER_CHANNEL, INT8 | PER_TOKEN, readable_experts=False)

    def encode_weight(self, weight: Tensor) -> Encoded:
        return Encoded(*encode("quantize_rows_int8", weight), tuple(weight.shape))

    def dequantize(self, weight: Encoded, dtype: torch.dtype) -> Tensor:
        return decode("dequantize_rows", weight.codes, weight.scales, dtype)
