"""What runs on a CPU. All sums are float32 or wider, or integer, whatever the compute dtype: CPUs are slow or inexact
below. Where inputs are encoded, no sum may depend on how many rows there are: a last bit that differs gives the next
layer's input another code, and the layers after it carry that on. Hence float64 for codes of e4m3.

8-bit integers are the fast format here: with VNNI or AMX a layer of 1,024 inputs takes a third of its float32 time; in
tiny layers encoding the input costs more than the product. 4-bit and fp8 weights are decoded for every product: they
are for agreement with an accelerator, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.quant.kernels import reference
from lockstep.quant.kernels.reference import GROUP, spread

SLICE = 2**16  # float32 values: a quarter of a megabyte
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
    """Exact in float64, which holds any sum of products of such codes."""
    return _rescale(_product(to_float(xq).double(), wq, lambda codes: to_float(codes).double()).float(), sx, sw, dtype)


def fp8_block_matmul(xq: Tensor, sx: Tensor, wq: Tensor, sw: Tensor, dtype: torch.dtype) -> Tensor:
    x, scales = dequantize_groups(xq, sx, torch.float64), _spread_rows(sw, len(wq))
    return _product(x, wq, lambda codes, s: dequantize_groups(codes, s, torch.float64), scales).float().to(dtype)


def w4a16_matmul(x: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    def weight(codes: Tensor, s: Tensor) -> Tensor:
        return dequantize_int4(codes, s, x.shape[-1], x.dtype).float()

    return _product(x.float(), packed, weight, scales).to(dtype)


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
    def weight(codes: Tensor, s: Tensor) -> Tensor:
        return dequantize_int4(codes, s, xq.shape[-1], torch.float64)

    return _product(to_float(xq).double(), packed, weight, scales).float().mul_(sx[:, None]).to(dtype)


def dequantize_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return to_float(codes).mul_(scales[..., None]).to(dtype)


def dequantize_groups(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    values = to_float(codes)
    if codes.shape[-1] % GROUP:
        return values.mul_(spread(scales, codes.shape[-1])).to(dtype)
    values.unflatten(-1, (-1, GROUP)).mul_(scales[..., None])  # a view: no scales spread in memory
    return values.to(dtype)


def dequantize_blocks(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return dequantize_groups(codes, _spread_rows(scales, codes.shape[-2]), dtype)


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


def _spread_rows(scales: Tensor, N: int) -> Tensor:
    """[..., ceil(N / 128), G] to [..., N, G]."""
    return spread(scales.mT, N).mT


def _product(x: Tensor, codes: Tensor, decode: Callable[..., Tensor], *scales: Tensor) -> Tensor:
    """x [M, K] times `decode(codes, *scales)` [N, K], a few outputs at a time: what is decoded stays in the cache."""
    step = max(1, SLICE // x.shape[-1])
    parts = [F.linear(x, decode(*part)) for part in zip(*(t.split(step) for t in (codes, *scales)), strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _rescale(acc: Tensor, sx: Tensor, sw: Tensor, dtype: torch.dtype) -> Tensor:
    return acc.mul_(sx[:, None]).mul_(sw).to(dtype)
