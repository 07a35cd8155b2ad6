"""The libraries' low-bit products on CUDA, within their limits. Nothing here waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.quant.kernels import reference
from lockstep.quant.kernels.reference import GROUP

MIN_ROWS = 32  # `_int_mm` refuses 16 and fewer


def int8_matmul(xq: Tensor, sx: Tensor, wq: Tensor, sw: Tensor, dtype: torch.dtype) -> Tensor:
    rows = len(xq)
    padded = F.pad(xq, (0, 0, 0, max(0, MIN_ROWS - rows)))
    acc = torch._int_mm(padded, wq.mT)[:rows]
    return (acc.float() * sx[:, None] * sw).to(dtype)


def fp8_matmul(xq: Tensor, sx: Tensor, wq: Tensor, sw: Tensor, dtype: torch.dtype) -> Tensor:
    return torch._scaled_mm(xq, wq.mT, sx[:, None], sw[None, :], out_dtype=dtype, use_fast_accum=False)


def w4a16_matmul(x: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return F.linear(x, dequantize_int4(packed, scales, x.shape[-1], x.dtype)).to(dtype)


def dequantize_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """One kernel converts, multiplies in float32 and rounds. No operator mixes e4m3, so it is bfloat16 first: exact."""
    mixable = codes if codes.dtype == torch.int8 else codes.bfloat16()
    return torch.mul(mixable, scales[..., None], out=torch.empty_like(mixable, dtype=dtype))


def dequantize_int4(packed: Tensor, scales: Tensor, K: int, dtype: torch.dtype) -> Tensor:
    if K % GROUP:
        return reference.dequantize_int4(packed, scales, K, dtype)
    groups = packed.unflatten(-1, (-1, GROUP // 2))
    codes = torch.stack([groups & 15, groups >> 4], -2).view(torch.int8).sub_(8).flatten(-2)
    return dequantize_rows(codes, scales, dtype).flatten(-2)
