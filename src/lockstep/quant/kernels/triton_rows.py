"""Activations to 8 bits on a GPU: one program a row, which is read once. Equal to the reference bit for bit.

A row that holds a NaN gets the scale NaN, and with it every output: nothing is hidden and nothing waits for the device.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.quant.inputs import InputCode
from lockstep.quant.kernels.triton_tiles import DEPENDENT, GROUP, await_inputs, cdiv, let_next_start, power_of_2

INT8_MAX, INT8_MIN_SCALE = tl.constexpr(127.0), tl.constexpr(2.0**-126)
FP8_MAX, FP8_MIN_SCALE = tl.constexpr(448.0), tl.constexpr(1 / (448 * 512))
TO_NEAREST = tl.constexpr(1.5 * 2**23)  # added and taken away, it leaves the nearest integer, ties to even


def quantize_rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] to int8 codes [..., K] and scales [...]."""
    return _quantize(x, InputCode("int8"))


def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] to e4m3 codes [..., K] and scales [...]."""
    return _quantize(x, InputCode("fp8"))


def quantize_groups_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] to e4m3 codes [..., K] and scales [..., ceil(K / 128)]."""
    return _quantize(x, InputCode("fp8", grouped=True))


def empty_codes(shape: torch.Size, code: InputCode, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for the codes and scales of rows [..., K]."""
    *lead, K = shape
    scales = (*lead, cdiv(K, GROUP)) if code.grouped else lead
    return (
        torch.empty(shape, dtype=code.dtype, device=device),
        torch.empty(scales, dtype=torch.float32, device=device),
    )


def _quantize(x: Tensor, code: InputCode) -> tuple[Tensor, Tensor]:
    K = x.shape[-1]
    x = x.contiguous()
    codes, scales = empty_codes(x.shape, code, x.device)
    W = GROUP if code.grouped else power_of_2(K)
    G = power_of_2(cdiv(K, W))
    if x.numel():
        warps = min(32, max(1, W * G // 512))
        _quantize_row[(x.numel() // K,)](
            x, codes, scales, K, W=W, G=G, DEPENDENT=DEPENDENT, num_warps=warps, launch_pdl=DEPENDENT
        )
    return codes, scales


@triton.jit
def _quantize_row(x, codes, scales, K, W: tl.constexpr, G: tl.constexpr, DEPENDENT: tl.constexpr):
    let_next_start(DEPENDENT)
    await_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, G)[:, None] * W + tl.arange(0, W)[None, :]
    store_codes(tl.load(x + row * K + k, k < K, 0.0).to(tl.float32), codes, scales, row, 0, K)


@triton.jit
def store_codes(value, codes, scales, row, first, K):
    """Encodes values [G, W] of a row of K, each line with a scale of its own; `first` is the line they begin with.

    Float32, rounded to the tensor's type before, and 0 beyond the end of the row.
    """
    G: tl.constexpr = value.shape[0]
    W: tl.constexpr = value.shape[1]
    line = first + tl.arange(0, G)
    k = line[:, None] * W + tl.arange(0, W)[None, :]
    scale = scale_of(absmax_of(value, 1).to(tl.float32, bitcast=True), codes)
    code = codes_of(value, scale[:, None], codes)
    tl.store(codes + row * K + k, code, k < K)
    tl.store(scales + row * tl.cdiv(K, W) + line, scale, line * W < K)


@triton.jit
def scale_of(absmax, codes):
    """That makes the largest magnitude the largest of the codes which `codes` points to."""
    if codes.dtype.element_ty == tl.int8:
        scale = _at_least(tl.div_rn(absmax, INT8_MAX), INT8_MIN_SCALE)
    else:
        scale = fp8_scale(absmax)
    return scale


@triton.jit
def codes_of(value, scale, codes):
    """Of the type that `codes` points to."""
    kind: tl.constexpr = codes.dtype.element_ty
    if kind == tl.int8:
        code = tl.clamp(quotient(value, scale), -INT8_MAX, INT8_MAX) + TO_NEAREST
        code = code.to(tl.int32, bitcast=True)  # its last bits are the integer; a conversion takes longer
    else:
        code = fp8_codes(value, scale)
    return code.to(kind)


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
    return tl.clamp(quotient(value, scale), -FP8_MAX, FP8_MAX)


@triton.jit
def quotient(value, by):
    """value / by, rounded as a division rounds it: three operations a value, and one division for all that share `by`.

    The remainder of an estimate corrects it to the nearest float (Markstein), unless its last bits are too small for
    one: tiny values are moved up by a power of two. With these signs -0 stays -0; Triton's own minus is 0 - x.
    """
    up = tl.where(by < 2.0**-60, 2.0**64, 1.0)
    by *= up
    minus_value, minus_inverse = value * (up * -1.0), tl.div_rn(-1.0, by)
    estimate = minus_value * minus_inverse
    return tl.fma(tl.fma(estimate, by, minus_value), minus_inverse, estimate)


@triton.jit
def _at_least(scale, smallest):
    return tl.where(scale < smallest, smallest, scale)  # keeps NaN
