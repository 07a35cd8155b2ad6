"""The arithmetic every format stands for, in plain torch ops that run anywhere. Fast kernels are tested against it.

Integer formats: codes and accumulators of a fast kernel are equal to these, bit for bit. Floating formats: a fast
kernel may add in another order and precision, within `error_bound`. Here sums are float64, which holds every sum of
products of codes exactly.

Shapes: M rows, K inputs, N outputs, E experts, G = ceil(K / 128) groups. Scales are float32; those of 4-bit weights are
values that bfloat16 holds.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

GROUP = 128  # values of K that share a scale in 4-bit weights and in fp8 blocks
INT8_MAX, FP8_MAX, INT4_MAX = 127.0, 448.0, 7.0
INT8_MIN_SCALE = 2.0**-126  # the smallest normal float32: a row of zeros has codes 0, not 0/0
FP8_MIN_SCALE = 1 / (448 * 512)
INT4_MIN_SCALE = 1e-5


def quantize_rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] to int8 codes [..., K] and scales [...]."""
    x = x.float()
    scales = _scales(x.abs().amax(-1), INT8_MAX, INT8_MIN_SCALE)
    return _round(x / scales[..., None], INT8_MAX), scales


def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] to e4m3 codes [..., K] and scales [...]."""
    x = x.float()
    scales = _scales(x.abs().amax(-1), FP8_MAX, FP8_MIN_SCALE)
    return _saturate(x / scales[..., None]), scales


def quantize_groups_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] to e4m3 codes [..., K] and scales [..., G] of 1×128 values."""
    x = x.float()
    scales = _scales(group_absmax(x), FP8_MAX, FP8_MIN_SCALE)
    return _saturate(x / spread(scales, x.shape[-1])), scales


def quantize_blocks_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., N, K] to e4m3 codes [..., N, K] and scales [..., ceil(N / 128), G] of 128×128 values."""
    weight = weight.float()
    absmax = group_absmax(group_absmax(weight).mT).mT
    scales = _scales(absmax, FP8_MAX, FP8_MIN_SCALE)
    return _saturate(weight / spread_blocks(scales, weight.shape)), scales


def quantize_groups_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] to int8 codes within ±7 [..., K] and scales [..., G], each a value that bfloat16 holds.

    A code times such a scale is exact in float32, so that a decoded weight is rounded once, in whatever type.
    """
    weight = weight.float()
    scales = _scales(group_absmax(weight), INT4_MAX, INT4_MIN_SCALE).bfloat16().float()
    return _round(weight / spread(scales, weight.shape[-1]), INT4_MAX), scales


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., N, K] to packed codes [..., N, ceil(K / 2)] and scales [..., N, G], which lie group by group in memory.

    A kernel that computes many outputs over one group then reads their scales side by side.
    """
    codes, scales = quantize_groups_int4(weight)
    return pack_int4(codes), scales.mT.contiguous().mT


def group_absmax(x: Tensor) -> Tensor:
    """[..., K] to [..., G]; the last group may be shorter."""
    padded = F.pad(x.abs(), (0, -x.shape[-1] % GROUP))
    return padded.unflatten(-1, (-1, GROUP)).amax(-1)


def spread(scales: Tensor, K: int) -> Tensor:
    """[..., G] to [..., K]: each value's own scale."""
    return scales.repeat_interleave(GROUP, -1)[..., :K]


def spread_blocks(scales: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """[..., ceil(N / 128), G] to [..., N, K]."""
    return spread(spread(scales, shape[-1]).mT, shape[-2]).mT


def pack_int4(codes: Tensor) -> Tensor:
    """int8 codes [..., K] to uint8 [..., ceil(K / 2)]: code + 8 in a nibble, a group's first half in the low ones.

    Halves, not pairs: a kernel then multiplies the low nibbles by x[:64] and the high ones by x[64:] of the group,
    and never has to interleave registers.
    """
    return torch.cat([_pack_group(group) for group in (codes + 8).to(torch.uint8).split(GROUP, -1)], -1)


def unpack_int4(packed: Tensor, K: int) -> Tensor:
    groups = [torch.cat([bytes & 15, bytes >> 4], -1) for bytes in packed.split(GROUP // 2, -1)]
    return torch.cat(groups, -1)[..., :K].to(torch.int8) - 8  # an odd group ends with one nibble of padding


def _pack_group(nibbles: Tensor) -> Tensor:
    half = (nibbles.shape[-1] + 1) // 2
    high = F.pad(nibbles[..., half:], (0, nibbles.shape[-1] % 2), value=8)
    return nibbles[..., :half] | (high << 4)


def int8_matmul(xq: Tensor, sx: Tensor, wq: Tensor, sw: Tensor, dtype: torch.dtype) -> Tensor:
    """y = (Σ xq·wq · sx)·sw: the sum exact, the rest float32."""
    return _rescaled(xq.double() @ wq.double().mT, sx, sw, dtype)


def fp8_matmul(xq: Tensor, sx: Tensor, wq: Tensor, sw: Tensor, dtype: torch.dtype) -> Tensor:
    """The same over e4m3 codes. Fast kernels sum in float32."""
    return _rescaled(xq.double() @ wq.double().mT, sx, sw, dtype)


def fp8_block_matmul(xq: Tensor, sx: Tensor, wq: Tensor, sw: Tensor, dtype: torch.dtype) -> Tensor:
    """y = Σ (xq·sx)·(wq·sw), with sx [M, G] and sw [ceil(N / 128), G]."""
    x, weight = dequantize_groups(xq, sx, torch.float32), dequantize_blocks(wq, sw, torch.float32)
    return (x.double() @ weight.double().mT).to(dtype)


def w4a16_matmul(x: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """y = Σ x·w, with w = code·s rounded to the dtype of x."""
    weight = dequantize_int4(packed, scales, x.shape[-1], x.dtype)
    return (x.double() @ weight.double().mT).to(dtype)


def w4a8_matmul(xq: Tensor, sx: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """y = (Σ_g (Σ xq·code)_g · s_g)·sx: the inner sums exact, the outer one float32 in the order of g."""
    codes = unpack_int4(packed, xq.shape[-1])
    y = torch.zeros(len(xq), len(codes), device=xq.device)
    for g, (x, w) in enumerate(zip(xq.split(GROUP, -1), codes.split(GROUP, -1), strict=True)):
        y += (x.double() @ w.double().mT).float() * scales[:, g]
    return (y * sx[:, None]).to(dtype)


def w4a8_fp8_matmul(xq: Tensor, sx: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The same over e4m3 activations. Fast kernels sum in float32, in any order."""
    return w4a8_matmul(xq, sx, packed, scales, dtype)


def dequantize_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes [..., K] and scales [...] to code·s in float32, rounded to `dtype`; so do the next three."""
    return (codes.float() * scales[..., None]).to(dtype)


def dequantize_groups(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales [..., G]."""
    return (codes.float() * spread(scales, codes.shape[-1])).to(dtype)


def dequantize_blocks(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales [..., ceil(N / 128), G]."""
    return (codes.float() * spread_blocks(scales, codes.shape)).to(dtype)


def dequantize_int4(packed: Tensor, scales: Tensor, K: int, dtype: torch.dtype) -> Tensor:
    """Packed codes, scales [..., G]."""
    return dequantize_groups(unpack_int4(packed, K), scales, dtype)


def error_bound(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    """How far a fast kernel may be from the reference's y [M, N], for dequantized x [M, K] and weight [N, K].

    K float32 additions in any order and four roundings of each term (two dequantizations, their product, a rescaling),
    of Σ|x|·|w|; then the cast to the dtype of y on both sides, of |y|. Exact accumulators leave only the cast's part.
    """
    terms = x.double().abs() @ weight.double().abs().mT
    summed = (x.shape[-1] + 4) * torch.finfo(torch.float32).eps * terms
    return summed + 2 * torch.finfo(y.dtype).eps * y.double().abs()


def _scales(absmax: Tensor, largest: float, smallest: float) -> Tensor:
    # By a tensor: CUDA multiplies by the reciprocal of a Python number, which is another scale in the last bit.
    return (absmax / torch.full_like(absmax, largest)).clamp_min(smallest)


def _round(x: Tensor, largest: float) -> Tensor:
    return x.round().clamp(-largest, largest).to(torch.int8)  # round: half to even


def _saturate(x: Tensor) -> Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def _rescaled(acc: Tensor, sx: Tensor, sw: Tensor, dtype: torch.dtype) -> Tensor:
    return (acc.float() * sx[:, None] * sw).to(dtype)
