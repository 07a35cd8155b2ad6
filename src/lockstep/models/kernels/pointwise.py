"""What stands between the matrix products of a decoder layer, each as one Triton kernel.

Every value is rounded where the modules of transformers round it; the learner's (`differentiable.py`) are made of
these. (A product and a sum must not be fused: they would round once, not twice.) With `Exact` the sums of norms are
float64: whoever else takes them so rounds the same in practice, in any order. With a `code`, the kernel that makes a
low-bit product's input also encodes it: to the same codes as the kernels of `lockstep.quant` would, which the learner
runs.

Shapes: N tokens, HQ query heads, H key/value heads, D head size.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from typing import overload

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.models.kv import LARGEST_E4M3, Pages
from lockstep.quant.inputs import EncodedInput, InputCode, Rows
from lockstep.quant.kernels.triton_rows import codes_of, empty_codes, scale_of, store_codes
from lockstep.quant.kernels.triton_tiles import DEPENDENT, GROUP, await_inputs, cdiv, let_next_start, power_of_2

LARGEST = tl.constexpr(LARGEST_E4M3)
FEW_TOKENS, SOME_TOKENS = 2048, 8  # from how many on a program rotates so many: else starting it takes longest
PIECE = 4096  # of a row that shares a scale


def rms_norm(x: Tensor, weight: Tensor, eps: float, code: InputCode | None = None) -> Rows:
    """x / rms(x) · weight, over the last dimension."""
    return _norm(x, None, weight, eps, code)[1]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, code: InputCode | None = None
) -> tuple[Tensor, Rows]:
    """(sum, norm of the sum)."""
    return _norm(x, residual, weight, eps, code)


def normed(x: Tensor, weight: Tensor, eps: float, *, exact: bool) -> Tensor:
    """`rms_norm`, or that of `Exact`, as a tensor."""
    found = _norm(x, None, weight, eps, None, exact)[1]
    assert isinstance(found, Tensor)
    return found


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, code: InputCode | None, exact: bool = False
) -> tuple[Tensor, Rows]:
    x, size = x.contiguous(), x.shape[-1]
    total = x if residual is None else torch.empty_like(x)
    residual = None if residual is None else residual.contiguous()
    out = _empty(x.shape, x, code)
    block = max(GROUP, power_of_2(size))
    _rms_norm[(x.numel() // size,)](
        x, residual, weight, total, *_pointers(out), eps, size, BLOCK=block, LINE=_line(code, block), EXACT=exact,
        DEPENDENT=DEPENDENT, launch_pdl=DEPENDENT, num_warps=warps(block), enable_fp_fusion=False,
    )  # fmt: skip
    return total, out


@overload
def gated_silu(gate_up: Tensor) -> Tensor: ...
@overload
def gated_silu(gate_up: Tensor, code: InputCode | None) -> Rows: ...
def gated_silu(gate_up: Tensor, code: InputCode | None = None) -> Rows:
    """silu(gate) · up, where the last dimension holds both, one after the other."""
    gate_up = gate_up.contiguous()
    *lead, both = gate_up.shape
    size = both // 2
    out = _empty(torch.Size([*lead, size]), gate_up, code)
    if code is not None and not code.grouped:
        _gated_row[gate_up.numel() // both,](
            gate_up, *_pointers(out)[1:], size, PIECE=PIECE, PIECES=cdiv(size, PIECE),
            DEPENDENT=DEPENDENT, launch_pdl=DEPENDENT, num_warps=32,
        )  # fmt: skip
        return out
    block = 1024
    _gated_silu[gate_up.numel() // both, cdiv(size, block)](
        gate_up, *_pointers(out), size, BLOCK=block, LINE=_line(code, block),
        DEPENDENT=DEPENDENT, launch_pdl=DEPENDENT, num_warps=warps(block),
    )  # fmt: skip
    return out


def _empty(shape: torch.Size, like: Tensor, code: InputCode | None) -> Rows:
    if code is None:
        return like.new_empty(shape)
    rows = torch.Size([shape[:-1].numel(), shape[-1]])
    return EncodedInput(empty_codes(rows, code, like.device), code, shape, like.dtype)


def _pointers(rows: Rows) -> tuple[Tensor | None, ...]:
    """Where a kernel writes (values, codes, scales): either the first or the others."""
    return (rows, None, None) if isinstance(rows, Tensor) else (None, *rows.rows)


def _line(code: InputCode | None, block: int) -> int:
    """How many of the values that a program makes share a scale."""
    return GROUP if code is not None and code.grouped else block


def warps(block: int) -> int:
    """Eight values a thread: a row alone on its multiprocessor needs many to hide that they wait for memory."""
    return min(32, block // 256) or 1


def rotary(inv_freq: Tensor, scaling: float, positions_1N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, [1, N, D]: both halves of a head turn by the same ones."""
    tables = inv_freq.new_empty(2, *positions_1N.shape, 2 * len(inv_freq), dtype=dtype)
    _rotary[(positions_1N.numel(),)](
        inv_freq, positions_1N, *tables, scaling, HALF=len(inv_freq), DEPENDENT=DEPENDENT, launch_pdl=DEPENDENT,
        num_warps=1,
    )  # fmt: skip
    return tables[0], tables[1]


def rotate_and_store(
    qkv_N: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    rotary: tuple[Tensor, Tensor],
    slots_N: Tensor,
    cache: Pages,
    *,
    exact: bool = False,
) -> Tensor:
    """Queries [N, HQ, D], normalised (if the model does) and rotated; keys likewise and values go to their slots."""
    cos, sin = (table.reshape(-1, table.shape[-1]).contiguous() for table in rotary)
    heads, size = cache.keys.shape[2:]
    num_tokens, width = qkv_N.shape
    num_queries = width // size - 2 * heads
    query = qkv_N.new_empty(num_tokens, num_queries, size)
    query_norm, key_norm = norms if norms is not None else (qkv_N, qkv_N)
    group = num_queries // heads
    tokens = 1 if num_tokens <= FEW_TOKENS else SOME_TOKENS
    _rotate_and_store[cdiv(num_tokens, tokens), heads](
        qkv_N, query_norm, key_norm, cos, sin, slots_N, query, *cache, eps, qkv_N.stride(0), num_tokens, TOKENS=tokens,
        H=heads, G=group, GP=power_of_2(group), D=size, S=cache.keys.shape[1], NORM=norms is not None,
        EXACT=exact, DEPENDENT=DEPENDENT, launch_pdl=DEPENDENT, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return query


class Exact:
    """The same, with sums of norms in float64."""

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float, code: InputCode | None = None) -> Rows:
        return _norm(x, None, weight, eps, code, exact=True)[1]

    @staticmethod
    def add_rms_norm(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float, code: InputCode | None = None
    ) -> tuple[Tensor, Rows]:
        return _norm(x, residual, weight, eps, code, exact=True)

    @staticmethod
    def gated_silu(gate_up: Tensor, code: InputCode | None) -> Rows:
        return gated_silu(gate_up, code)

    @staticmethod
    def rotate_and_store(
        qkv_N: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        rotary: tuple[Tensor, Tensor],
        slots_N: Tensor,
        cache: Pages,
    ) -> Tensor:
        return rotate_and_store(qkv_N, norms, eps, rotary, slots_N, cache, exact=True)


@triton.jit
def _rms_norm(
    x_ptr, residual_ptr, weight_ptr, total_ptr, out_ptr, codes_ptr, scales_ptr, eps, size,
    BLOCK: tl.constexpr, LINE: tl.constexpr, EXACT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_start(DEPENDENT)
    await_inputs(DEPENDENT)
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    kind = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * size + d, mask=d < size, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + d, mask=d < size, other=0.0)  # here, that it does not wait for the sum of squares
    if residual_ptr is not None:
        x = (x + tl.load(residual_ptr + row * size + d, mask=d < size, other=0.0).to(tl.float32)).to(kind)
        tl.store(total_ptr + row * size + d, x, mask=d < size)
        x = x.to(tl.float32)
    x = (x * tl.rsqrt(_sum(x * x, 0, EXACT) / size + eps)).to(kind)
    value = (weight.to(tl.float32) * x.to(tl.float32)).to(kind)
    _hand_on(value, out_ptr, codes_ptr, scales_ptr, row, 0, size, BLOCK, LINE)


@triton.jit
def _sum(x, axis: tl.constexpr, EXACT: tl.constexpr):
    if EXACT:
        return tl.sum(x.to(tl.float64), axis).to(tl.float32)
    return tl.sum(x, axis)


@triton.jit
def _gated_silu(
    x_ptr, out_ptr, codes_ptr, scales_ptr, size, BLOCK: tl.constexpr, LINE: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    let_next_start(DEPENDENT)
    await_inputs(DEPENDENT)
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate_ptr = x_ptr + row * 2 * size
    value = gated(gate_ptr, gate_ptr + size, d, size)
    _hand_on(value, out_ptr, codes_ptr, scales_ptr, row, tl.program_id(1), size, BLOCK, LINE)


@triton.jit
def _gated_row(
    x_ptr, codes_ptr, scales_ptr, size, PIECE: tl.constexpr, PIECES: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """A whole row, under one scale. In pieces: filled up to a power of two, it takes more time and registers."""
    let_next_start(DEPENDENT)
    await_inputs(DEPENDENT)
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, PIECE)
    values = ()
    largest = tl.zeros((PIECE,), tl.int32)
    for piece in tl.static_range(PIECES):
        gate_ptr = x_ptr + row * 2 * size
        value = gated(gate_ptr, gate_ptr + size, piece * PIECE + d, size).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value).to(tl.int32, bitcast=True))
        values = values + (value,)  # noqa: RUF005 - Triton has no starred expressions
    scale = scale_of(tl.max(largest, 0).to(tl.float32, bitcast=True), codes_ptr)
    tl.store(scales_ptr + row, scale)
    for piece in tl.static_range(PIECES):
        k = piece * PIECE + d
        tl.store(codes_ptr + row * size + k, codes_of(values[piece], scale, codes_ptr), k < size)


@triton.jit
def gated(gate_ptr, up_ptr, d, size):
    """silu(gate) · up, at d."""
    kind = gate_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + d, mask=d < size, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + d, mask=d < size, other=0.0).to(tl.float32)
    gate = (gate / (1 + tl.exp(-gate))).to(kind).to(tl.float32)
    return (gate * up).to(kind)


@triton.jit
def _hand_on(
    value, out_ptr, codes_ptr, scales_ptr, row, piece, size, BLOCK: tl.constexpr, LINE: tl.constexpr
):  # fmt: skip
    """Writes a piece of a row, [BLOCK]: its values or, one scale for each LINE of them, their codes."""
    if codes_ptr is None:
        d = piece * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_ptr + row * size + d, value, mask=d < size)
    else:
        # Two dimensions for G = 1 too: in one, the compiler would lay out loads, and with them sums, to suit the codes.
        lines = tl.reshape(value.to(tl.float32), (BLOCK // LINE, LINE))
        store_codes(lines, codes_ptr, scales_ptr, row, piece * (BLOCK // LINE), size)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])  # they may begin anywhere in a table
def _rotary(inv_freq_ptr, positions_ptr, cos_ptr, sin_ptr, scaling, HALF: tl.constexpr, DEPENDENT: tl.constexpr):
    let_next_start(DEPENDENT)
    await_inputs(DEPENDENT)
    token, d = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)
    angle = tl.load(positions_ptr + token).to(tl.float32) * tl.load(inv_freq_ptr + d)
    cos = (tl.cos(angle) * scaling).to(cos_ptr.dtype.element_ty)
    sin = (tl.sin(angle) * scaling).to(sin_ptr.dtype.element_ty)
    for half in tl.static_range(2):
        tl.store(cos_ptr + (token * 2 + half) * HALF + d, cos)
        tl.store(sin_ptr + (token * 2 + half) * HALF + d, sin)


@triton.jit
def _normed(x, partner, weight_ptr, d, other, eps, kind: tl.constexpr, D: tl.constexpr, EXACT: tl.constexpr):
    """Heads [H, D] and, in the same way, the other half of each: what rotation pairs them with."""
    scale = tl.rsqrt(_sum(x * x, 1, EXACT) / D + eps)[:, None]
    x = (x * scale).to(kind).to(tl.float32) * tl.load(weight_ptr + d).to(tl.float32)[None, :]
    partner = (partner * scale).to(kind).to(tl.float32) * tl.load(weight_ptr + other).to(tl.float32)[None, :]
    return x.to(kind).to(tl.float32), partner.to(kind).to(tl.float32)


@triton.jit
def rotated_heads(
    x_ptr, weight_ptr, cos, sin, sign, heads, d, other, eps, kind: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    NORM: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    x = tl.load(x_ptr + heads[:, None] * D + d, mask=(heads < H)[:, None], other=0.0).to(tl.float32)
    partner = tl.load(x_ptr + heads[:, None] * D + other, mask=(heads < H)[:, None], other=0.0).to(tl.float32)
    if NORM:
        x, partner = _normed(x, partner, weight_ptr, d, other, eps, kind, D, EXACT)
    straight = (x * cos).to(kind).to(tl.float32)
    crossed = (sign * partner * sin).to(kind).to(tl.float32)
    return (straight + crossed).to(kind)


@triton.jit(do_not_specialize=["num_tokens"])
def _rotate_and_store(
    qkv_ptr, query_norm_ptr, key_norm_ptr, cos_ptr, sin_ptr, slots_ptr, query_ptr, keys_ptr, values_ptr,
    key_scales_ptr, value_scales_ptr, eps, stride, num_tokens, TOKENS: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, S: tl.constexpr, NORM: tl.constexpr,
    EXACT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Some tokens' keys and values of one head, and the queries that read them."""
    let_next_start(DEPENDENT)
    await_inputs(DEPENDENT)
    begin, head = tl.program_id(0).to(tl.int64) * TOKENS, tl.program_id(1)
    kind: tl.constexpr = query_ptr.dtype.element_ty
    d, g, one = tl.arange(0, D), tl.arange(0, GP), tl.arange(0, 1)
    other = (d + D // 2) % D
    sign = tl.where(d < D // 2, -1.0, 1.0)
    for token in range(begin, tl.minimum(begin + TOKENS, num_tokens)):
        cos = tl.load(cos_ptr + token * D + d).to(tl.float32)
        sin = tl.load(sin_ptr + token * D + d).to(tl.float32)
        row = qkv_ptr + token * stride

        q = rotated_heads(row + head * G * D, query_norm_ptr, cos, sin, sign, g, d, other, eps, kind, G, D, NORM, EXACT)
        tl.store(query_ptr + ((token * H + head) * G + g[:, None]) * D + d, q, mask=(g < G)[:, None])
        slot = tl.load(slots_ptr + token).to(tl.int64)
        slot, scale = slot * H + head, (slot // S * H + head) * S + slot % S
        k = rotated_heads(
            row + (H * G + head) * D, key_norm_ptr, cos, sin, sign, one, d, other, eps, kind, 1, D, NORM, EXACT
        )
        _store(keys_ptr, key_scales_ptr, slot, scale, k, one, d, D)
        v = tl.load(row + (H * G + H + head) * D + one[:, None] * D + d)
        _store(values_ptr, value_scales_ptr, slot, scale, v, one, d, D)


@triton.jit
def _store(memory_ptr, scales_ptr, slot, place, vector, one, d, D: tl.constexpr):
    """A head [1, D] of one token, encoded if the memory has scales (its own at `place`): `Pages.store`."""
    if scales_ptr is not None:
        vector = vector.to(tl.float32)
        largest = tl.max(tl.abs(vector), 1)
        scale = tl.where(largest > 0, largest / LARGEST, 1.0)
        broken = tl.max((vector != vector).to(tl.int32), 1) > 0
        scale = tl.where(broken, float("nan"), scale)  # codes of NaN are not told from others as they are read
        tl.store(scales_ptr + place + one, scale)
        vector = vector / scale[:, None]
    tl.store(memory_ptr + (slot + one[:, None]) * D + d, vector.to(memory_ptr.dtype.element_ty))
