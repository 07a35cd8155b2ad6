"""What runs on a CPU. All sums are float32 or integer, whatever the compute dtype: CPUs are slow or inexact below.

8-bit integers are the fast format here: with VNNI or AMX `_int_mm` beats the float32 product from one row on.
4-bit and fp8 weights are unpacked for every product; they are for agreement with an accelerator, not for speed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.quant.kernels import reference
from lockstep.quant.kernels.reference import GROUP, spread, spread_blocks

EXACT_K = 1024  # 1024 · 127² < 2**24: up to here a float32 sum of products of int8 codes is exact in any order


def has_int8_dot() -> bool:
    """Whether `_int_mm` is exact and fast. Without VNNI, oneDNN may saturate 16-bit sums, or there is no fast path."""
    return torch.cpu._is_vnni_supported()


def int8_matmul_integer(xq: Tensor, sx: Tensor, wq: Tensor, sw: Tensor, dtype: torch.dtype) -> Tensor:
    return _rescale(torch._int_mm(xq, wq.mT).float(), sx, sw, dtype)


def int8_matmul_float(xq: Tensor, sx: Tensor, wq: Tensor, sw: Tensor, dtype: torch.dtype) -> Tensor:
    return _rescale(accumulate_float(xq, wq).float(), sx, sw, dtype)


def accumulate_float(xq: Tensor, wq: Tensor) -> Tensor:
    """The exact sums of products [M, N] through float32 products of at most 1,024 summands."""
    blocks = zip(xq.split(EXACT_K, -1), wq.split(EXACT_K, -1), strict=True)
    parts = [F.linear(x.float(), w.float()) for x, w in blocks]
    return parts[0] if len(parts) == 1 else torch.stack(parts).int().sum(0)


def fp8_matmul(xq: Tensor, sx: Tensor, wq: Tensor, sw: Tensor, dtype: torch.dtype) -> Tensor:
    return _rescale(F.linear(to_float(xq), to_float(wq)), sx, sw, dtype)


def fp8_block_matmul(xq: Tensor, sx: Tensor, wq: Tensor, sw: Tensor, dtype: torch.dtype) -> Tensor:
    x, weight = dequantize_groups(xq, sx, torch.float32), dequantize_blocks(wq, sw, torch.float32)
    return F.linear(x, weight).to(dtype)


def w4a16_matmul(x: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    weight = dequantize_int4(packed, scales, x.shape[-1], x.dtype)
    return F.linear(x.float(), weight.float()).to(dtype)


def w4a8_matmul_integer(xq: Tensor, sx: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """One integer product per group of 128."""
    codes = unpack_int4(packed, xq.shape[-1])
    y = xq.new_zeros(len(xq), len(codes), dtype=torch.float32)
    for g, (x, w) in enumerate(zip(xq.split(GROUP, -1), codes.split(GROUP, -1), strict=True)):
        y += torch._int_mm(x, w.mT).float().mul_(scales[:, g])
    return y.mul_(sx[:, None]).to(dtype)


def w4a8_matmul_float(xq: Tensor, sx: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """A group's sum is exact in float32, for 128 · 127 · 7 < 2**24."""
    codes = unpack_int4(packed, xq.shape[-1])
    y = xq.new_zeros(len(xq), len(codes), dtype=torch.float32)
    for g, (x, w) in enumerate(zip(xq.split(GROUP, -1), codes.split(GROUP, -1), strict=True)):
        y += F.linear(x.float(), w.float()).mul_(scales[:, g])
    return y.mul_(sx[:, None]).to(dtype)


def w4a8_fp8_matmul(xq: Tensor, sx: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """One float32 product over scaled codes."""
    y = F.linear(to_float(xq), dequantize_int4(packed, scales, xq.shape[-1], torch.float32))
    return y.mul_(sx[:, None]).to(dtype)


def dequantize_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return to_float(codes).mul_(scales[..., None]).to(dtype)


def dequantize_groups(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    values = to_float(codes)
    if codes.shape[-1] % GROUP:
        return values.mul_(spread(scales, codes.shape[-1])).to(dtype)
    values.unflatten(-1, (-1, GROUP)).mul_(scales[..., None])  # a view: no scales spread in memory
    return values.to(dtype)


def dequantize_blocks(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return to_float(codes).mul_(spread_blocks(scales, codes.shape)).to(dtype)


def dequantize_int4(packed: Tensor, scales: Tensor, K: int, dtype: torch.dtype) -> Tensor:
    return dequantize_groups(unpack_int4(packed, K), scales, dtype)


def to_float(codes: Tensor) -> Tensor:
    """Exactly, for codes of e4m3 some ten times faster than `.float()`: a float16's bits with the exponent off by 8.

    Not for NaN codes, which the formats refuse to make.
    """
    if codes.dtype != torch.float8_e4m3fn:
        return codes.float()
    bits = codes.view(torch.int8).to(torch.int16)  # extends the sign, which is then in its place
    magnitude = (bits & 127).bitwise_left_shift_(7)
    return bits.bitwise_and_(-32768).bitwise_or_(magnitude).view(torch.float16).float().mul_(256)


def unpack_int4(packed: Tensor, K: int) -> Tensor:
    """As the reference; whole groups in three passes, without joining their halves."""
    if K % GROUP:
        return reference.unpack_int4(packed, K)
    groups = packed.unflatten(-1, (-1, GROUP // 2))
    codes = torch.empty(*groups.shape[:-1], 2, GROUP // 2, dtype=torch.uint8)
    torch.bitwise_and(groups, 15, out=codes[..., 0, :])
    torch.bitwise_right_shift(groups, 4, out=codes[..., 1, :])
    return codes.view(torch.int8).sub_(8).flatten(-3)


def _rescale(acc: Tensor, sx: Tensor, sw: Tensor, dtype: torch.dtype) -> Tensor:
    return acc.mul_(sx[:, None]).mul_(sw).to(dtype)
