"""Activations to 8 bits on a GPU: one program a row, which is read once. Equal to the reference bit for bit.

A row that holds a NaN gets the scale NaN, and with it every output: nothing is hidden and nothing waits for the device.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.quant.kernels.triton_tiles import DEPENDENT, GROUP, await_inputs, cdiv, let_next_start

INT8_MAX, INT8_MIN_SCALE = tl.constexpr(127.0), tl.constexpr(2.0**-126)
FP8_MAX, FP8_MIN_SCALE = tl.constexpr(448.0), tl.constexpr(1 / (448 * 512))
TO_NEAREST = tl.constexpr(1.5 * 2**23)  # added and taken away, it leaves the nearest integer, ties to even


def quantize_rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] to int8 codes [..., K] and scales [...]."""
    codes, scales = _quantize(x, torch.int8, x.shape[-1])
    return codes, scales[..., 0]


def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] to e4m3 codes [..., K] and scales [...]."""
    codes, scales = _quantize(x, torch.float8_e4m3fn, x.shape[-1])
    return codes, scales[..., 0]


def quantize_groups_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] to e4m3 codes [..., K] and scales [..., ceil(K / 128)]."""
    return _quantize(x, torch.float8_e4m3fn, GROUP)


def _quantize(x: Tensor, dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor]:
    """One scale for every `width` values of a row."""
    *lead, K = x.shape
    x = x.contiguous()
    M = math.prod(lead)
    groups = cdiv(K, width)
    codes = torch.empty_like(x, dtype=dtype)
    scales = torch.empty(*lead, groups, dtype=torch.float32, device=x.device)
    W, G = triton.next_power_of_2(width), triton.next_power_of_2(groups)
    if M:
        warps = min(32, max(1, W * G // 512))
        _quantize_row[(M,)](
            x, codes, scales, K, groups, width, W=W, G=G, DEPENDENT=DEPENDENT,
            num_warps=warps, launch_pdl=DEPENDENT,
        )  # fmt: skip
    return codes, scales


@triton.jit
def _quantize_row(
    x, codes, scales, K, groups, width, W: tl.constexpr, G: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    let_next_start(DEPENDENT)
    await_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    group, place = tl.arange(0, G), tl.arange(0, W)
    k = group[:, None] * width + place[None, :]
    inside = (k < K) & (place < width)[None, :]
    value = tl.load(x + row * K + k, inside, 0.0).to(tl.float32)
    absmax = absmax_of(value, 1).to(tl.float32, bitcast=True)
    if codes.dtype.element_ty == tl.int8:
        scale = _at_least(tl.div_rn(absmax, INT8_MAX), INT8_MIN_SCALE)
        code = nearest(tl.clamp(tl.div_rn(value, scale[:, None]), -INT8_MAX, INT8_MAX))
    else:
        scale = fp8_scale(absmax)
        code = fp8_codes(value, scale[:, None])
    tl.store(codes + row * K + k, code.to(codes.dtype.element_ty), inside)
    tl.store(scales + row * groups + group, scale, group < groups)


@triton.jit
def absmax_of(value, axis: tl.constexpr):
    """The bits of the largest magnitude, compared as integers, so that NaN is the largest of all."""
    return tl.max(tl.abs(value).to(tl.int32, bitcast=True), axis)


@triton.jit
def nearest(value):
    return (value + TO_NEAREST) - TO_NEAREST


@triton.jit
def fp8_scale(absmax):
    return _at_least(tl.div_rn(absmax, FP8_MAX), FP8_MIN_SCALE)


@triton.jit
def fp8_codes(value, scale):
    return tl.clamp(tl.div_rn(value, scale), -FP8_MAX, FP8_MAX)


@triton.jit
def _at_least(scale, smallest):
    return tl.where(scale < smallest, smallest, scale)  # keeps NaN
