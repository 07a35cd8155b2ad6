"""What stands between the matrix products of a decoder layer, each as one Triton kernel.

Every value is rounded where the modules of transformers round it, so that the learner, which runs those, differs by the
order of sums only.

Shapes: N tokens, HQ query heads, H key/value heads, D head size.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.models.kv import LARGEST_E4M3, Pages

LARGEST = tl.constexpr(LARGEST_E4M3)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight, over the last dimension."""
    x = x.contiguous()
    out, size = torch.empty_like(x), x.shape[-1]
    block = triton.next_power_of_2(size)
    _rms_norm[(x.numel() // size,)](x, weight, out, eps, size, BLOCK=block, num_warps=4 if block <= 4096 else 8)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(sum, norm of the sum)."""
    x, residual = x.contiguous(), residual.contiguous()
    total, out, size = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    block = triton.next_power_of_2(size)
    _add_rms_norm[(x.numel() // size,)](
        x, residual, weight, total, out, eps, size, BLOCK=block, num_warps=4 if block <= 4096 else 8
    )
    return total, out


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up, where the last dimension holds both, one after the other."""
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    _gated_silu[out.numel() // size, triton.cdiv(size, 1024)](gate_up, out, size, BLOCK=1024, num_warps=4)
    return out


def rotate_and_store(
    qkv_N: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    rotary: tuple[Tensor, Tensor],
    slots_N: Tensor,
    cache: Pages,
) -> Tensor:
    """Queries [N, HQ, D], normalised (if the model does) and rotated; keys likewise and values go to their slots."""
    cos, sin = (table.reshape(-1, table.shape[-1]).contiguous() for table in rotary)
    heads, size = cache.keys.shape[2:]
    num_tokens, width = qkv_N.shape
    num_queries = width // size - 2 * heads
    query = qkv_N.new_empty(num_tokens, num_queries, size)
    query_norm, key_norm = norms if norms is not None else (qkv_N, qkv_N)
    _rotate_and_store[(num_tokens,)](
        qkv_N, query_norm, key_norm, cos, sin, slots_N, query, *cache, eps, qkv_N.stride(0),
        HQ=num_queries, HQP=triton.next_power_of_2(num_queries), H=heads, HP=triton.next_power_of_2(heads), D=size,
        NORM=norms is not None, num_warps=4,
    )  # fmt: skip
    return query


@triton.jit
def _rms_norm(x_ptr, weight_ptr, out_ptr, eps, size, BLOCK: tl.constexpr):
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    kind = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * size + d, mask=d < size, other=0.0).to(tl.float32)
    x = (x * tl.rsqrt(tl.sum(x * x, 0) / size + eps)).to(kind)
    weight = tl.load(weight_ptr + d, mask=d < size, other=0.0)
    tl.store(out_ptr + row * size + d, (weight.to(tl.float32) * x.to(tl.float32)).to(kind), mask=d < size)


@triton.jit
def _add_rms_norm(x_ptr, residual_ptr, weight_ptr, total_ptr, out_ptr, eps, size, BLOCK: tl.constexpr):
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    kind = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * size + d, mask=d < size, other=0.0).to(tl.float32)
    x = (x + tl.load(residual_ptr + row * size + d, mask=d < size, other=0.0).to(tl.float32)).to(kind)
    tl.store(total_ptr + row * size + d, x, mask=d < size)
    x = x.to(tl.float32)
    x = (x * tl.rsqrt(tl.sum(x * x, 0) / size + eps)).to(kind)
    weight = tl.load(weight_ptr + d, mask=d < size, other=0.0)
    tl.store(out_ptr + row * size + d, (weight.to(tl.float32) * x.to(tl.float32)).to(kind), mask=d < size)


@triton.jit
def _gated_silu(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kind = out_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * 2 * size + d, mask=d < size, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * size + size + d, mask=d < size, other=0.0).to(tl.float32)
    gate = (gate / (1 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out_ptr + row * size + d, (gate * up).to(kind), mask=d < size)


@triton.jit
def _normed(x, partner, weight_ptr, d, other, eps, kind: tl.constexpr, D: tl.constexpr):
    """Heads [H, D] and, in the same way, the other half of each: what rotation pairs them with."""
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    x = (x * scale).to(kind).to(tl.float32) * tl.load(weight_ptr + d).to(tl.float32)[None, :]
    partner = (partner * scale).to(kind).to(tl.float32) * tl.load(weight_ptr + other).to(tl.float32)[None, :]
    return x.to(kind).to(tl.float32), partner.to(kind).to(tl.float32)


@triton.jit
def _rotated(
    x_ptr, weight_ptr, cos, sin, sign, heads, d, other, eps, kind: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    x = tl.load(x_ptr + heads[:, None] * D + d, mask=(heads < H)[:, None], other=0.0).to(tl.float32)
    partner = tl.load(x_ptr + heads[:, None] * D + other, mask=(heads < H)[:, None], other=0.0).to(tl.float32)
    if NORM:
        x, partner = _normed(x, partner, weight_ptr, d, other, eps, kind, D)
    straight = (x * cos).to(kind).to(tl.float32)
    crossed = (sign * partner * sin).to(kind).to(tl.float32)
    return (straight + crossed).to(kind)


@triton.jit
def _rotate_and_store(
    qkv_ptr, query_norm_ptr, key_norm_ptr, cos_ptr, sin_ptr, slots_ptr, query_ptr, keys_ptr, values_ptr,
    key_scales_ptr, value_scales_ptr, eps, stride,
    HQ: tl.constexpr, HQP: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    kind: tl.constexpr = query_ptr.dtype.element_ty
    d = tl.arange(0, D)
    other = (d + D // 2) % D
    sign = tl.where(d < D // 2, -1.0, 1.0)
    cos = tl.load(cos_ptr + token * D + d).to(tl.float32)
    sin = tl.load(sin_ptr + token * D + d).to(tl.float32)
    row = qkv_ptr + token * stride
    hq, h = tl.arange(0, HQP), tl.arange(0, HP)

    q = _rotated(row, query_norm_ptr, cos, sin, sign, hq, d, other, eps, kind, HQ, D, NORM)
    tl.store(query_ptr + (token * HQ + hq[:, None]) * D + d, q, mask=(hq < HQ)[:, None])
    slot = tl.load(slots_ptr + token).to(tl.int64) * H
    k = _rotated(row + HQ * D, key_norm_ptr, cos, sin, sign, h, d, other, eps, kind, H, D, NORM)
    _store(keys_ptr, key_scales_ptr, slot, k, h, d, H, D)
    v = tl.load(row + (HQ + H) * D + h[:, None] * D + d, mask=(h < H)[:, None], other=0.0)
    _store(values_ptr, value_scales_ptr, slot, v, h, d, H, D)


@triton.jit
def _store(memory_ptr, scales_ptr, slot, vectors, h, d, H: tl.constexpr, D: tl.constexpr):
    """Heads [H, D] of one token, encoded if the memory has scales: `Pages.store`."""
    if scales_ptr is not None:
        vectors = vectors.to(tl.float32)
        largest = tl.max(tl.abs(vectors), 1)
        scale = tl.where(largest > 0, largest / LARGEST, 1.0)
        tl.store(scales_ptr + slot + h, scale, mask=h < H)
        vectors = vectors / scale[:, None]
    tl.store(memory_ptr + (slot + h[:, None]) * D + d, vectors.to(memory_ptr.dtype.element_ty), mask=(h < H)[:, None])
