"""int4 weights in groups of 128 inputs, 8-bit inputs per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lockstep.quant.encoded import Encoded
from lockstep.quant.format import Format
from lockstep.quant.inputs import InputCode
from lockstep.quant.kernels import decode, encode
from lockstep.quant.scheme import INT4, INT8, PER_TOKEN, Scheme


@dataclass(frozen=True, slots=True)
class W4A8(Format):
    """y = (Σ_g (Σ q_x·q_w)_g · s_g)·s_x over groups g;  with int8 inputs the inner sums are exact.

    Weights have the codes and scales of `W4A16`.
    """

    bits: ClassVar[int] = 4
    inputs: Literal["int8", "fp8"] = "int8"
    """What inputs are encoded in."""

    @property
    def operation(self) -> str:
        return "w4a8_matmul" if self.inputs == "int8" else "w4a8_fp8_matmul"

    @property
    def input_code(self) -> InputCode:
        return InputCode(self.inputs)

    @property
    def batch_invariant(self) -> bool:
        return True

    @property
    def scheme(self) -> Scheme | None:
        if self.inputs == "fp8":
            return None
        return Scheme("int-quantized", INT4, INT8 | PER_TOKEN, readable_experts=False)

    def encode_weight(self, weight: Tensor) -> Encoded:
        return Encoded(*encode("quantize_int4", weight), tuple(weight.shape))

    def dequantize(self, weight: Encoded, dtype: torch.dtype) -> Tensor:
        return decode("dequantize_int4", weight.codes, weight.scales, weight.shape[-1], dtype)
