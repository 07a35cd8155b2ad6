"""The libraries' low-bit products on CUDA, within their limits. Nothing here waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.quant.kernels.reference import dequantize_int4

MIN_ROWS = 32  # `_int_mm` refuses 16 and fewer


def int8_matmul(xq: Tensor, sx: Tensor, wq: Tensor, sw: Tensor, dtype: torch.dtype) -> Tensor:
    rows = len(xq)
    padded = F.pad(xq, (0, 0, 0, max(0, MIN_ROWS - rows)))
    acc = torch._int_mm(padded, wq.mT)[:rows]
    return (acc.float() * sx[:, None] * sw).to(dtype)


def fp8_matmul(xq: Tensor, sx: Tensor, wq: Tensor, sw: Tensor, dtype: torch.dtype) -> Tensor:
    return torch._scaled_mm(xq, wq.mT, sx[:, None], sw[None, :], out_dtype=dtype, use_fast_accum=False)


def w4a16_matmul(x: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    weight = dequantize_int4(packed, scales, x.shape[-1]).to(x.dtype)
    return F.linear(x, weight).to(dtype)
