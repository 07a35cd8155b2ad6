"""e4m3 weights and inputs: a scale per output channel and token, or per 128×128 block and 1×128 group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lockstep.quant.encoded import Encoded
from lockstep.quant.format import Format
from lockstep.quant.inputs import InputCode
from lockstep.quant.kernels import decode, encode
from lockstep.quant.scheme import BLOCKS, FP8, PER_CHANNEL, PER_GROUP, PER_TOKEN, Scheme


@dataclass(frozen=True, slots=True)
class FP8W8A8(Format):
    """q = x / s rounded to e4m3, s = max(absmax / 448, 1 / (448·512));  y = (Σ q_x·q_w · s_x)·s_w in float32;  with
    block: y = Σ (q_x·s_x)·(q_w·s_w), with the scales of each block."""

    bits: ClassVar[int] = 8
    block: bool = False
    """A scale per 128×128 block of weights and per 128 inputs, in place of one per channel and token."""

    @property
    def operation(self) -> str:
        return "fp8_block_matmul" if self.block else "fp8_matmul"

    @property
    def input_code(self) -> InputCode:
        return InputCode("fp8", grouped=self.block)

    @property
    def batch_invariant(self) -> bool:
        return self.block  # a scale per channel: of many rows the library's product

    @property
    def scheme(self) -> Scheme:
        if self.block:
            return Scheme("float-quantized", FP8 | BLOCKS, FP8 | PER_GROUP, readable_experts=False)
        return Scheme("float-quantized", FP8 | PER_CHANNEL, FP8 | PER_TOKEN, readable_experts=True)

    def encode_weight(self, weight: Tensor) -> Encoded:
        codes, scales = encode("quantize_blocks_fp8" if self.block else "quantize_rows_fp8", weight)
        return Encoded(codes, scales, tuple(weight.shape))

    def dequantize(self, weight: Encoded, dtype: torch.dtype) -> Tensor:
        return decode("dequantize_blocks" if self.block else "dequantize_rows", weight.codes, weight.scales, dtype)
