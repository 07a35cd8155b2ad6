"""The output layer on a GPU: how log-probs are summed up and, for `rollout.exact`, a product in which a row does not
depend on others.

A logit is summed along K in one order, whatever tile its row is in. Of a row's logits every piece reports the largest
and its mass, the pieces add up in float64. The engine's draws (`rollout/kernels.py`) are made of the same functions, so
that a log-prob has the same bits on both sides if its row of logits has.

Shapes: M rows, K inputs, V vocabulary.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.quant.kernels.triton_tiles import DEPENDENT, await_inputs, cdiv, let_next_start, power_of_2

PIECE = 4096  # of a row of logits
TOKENS, WIDTH = 128, 64  # of a tile: outputs, and what of K is multiplied at a time
WARPS = {16: 4, 32: 4, 64: 4, 128: 8, 256: 8}  # for so many rows of a tile
LARGE_TILE = 3 * (TOKENS + 256) * WIDTH * 2  # bytes of shared memory that the largest takes


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[..., K] and [V, K] to [..., V], rounded to `dtype` once. Without a gradient: the caller has it."""
    assert not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
    rows, (V, K) = x.reshape(-1, x.shape[-1]).contiguous(), weight.shape
    assert weight.is_contiguous()
    assert rows.shape[1] == K
    sizes = tile_sizes(x.device)
    tile = next((size for size in sizes if len(rows) <= size), sizes[-1])
    y, row_tiles = rows.new_empty(len(rows), V, dtype=dtype), cdiv(len(rows), tile)
    if len(rows):
        _linear[(row_tiles * cdiv(V, TOKENS),)](  # the row tiles of an output run together: its weights are read once
            rows, weight, bias, y, len(rows), V, row_tiles, K=K, BM=tile, BV=TOKENS, BK=WIDTH, num_warps=WARPS[tile],
            num_stages=4,
        )  # fmt: skip
    return y.view(*x.shape[:-1], V)


def tile_sizes(device: torch.device) -> list[int]:
    """Rows of the tiles that its shared memory holds."""
    largest = torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 2**20
    return [size for size in WARPS if size < max(WARPS) or largest >= LARGE_TILE]


def survey(logits_MV: Tensor, temperature_M: Tensor) -> tuple[Tensor, Tensor]:
    """Of every piece of a row, the largest logit and the mass relative to it, [M, pieces]."""
    top, mass = logits_MV.new_empty(2, len(logits_MV), cdiv(logits_MV.shape[1], PIECE), dtype=torch.float32)
    _launch_survey(logits_MV, temperature_M, top, mass, None)
    return top, mass


def _launch_survey(logits_MV: Tensor, temperature_M: Tensor, top: Tensor, mass: Tensor, moment: Tensor | None) -> None:
    (rows, vocab), pieces = logits_MV.shape, top.shape[1]
    _survey[rows, pieces](
        logits_MV, temperature_M, top, mass, moment, vocab, pieces, PIECE=PIECE, DEPENDENT=DEPENDENT,
        launch_pdl=DEPENDENT, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def log_probs(logits_MV: Tensor, tokens_M: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob of each row's token and log of the sum of exponentials, as `rollout.kernels.draw` has them, and the
    row's entropy)."""
    logits_MV = logits_MV.contiguous()
    rows, vocab = logits_MV.shape
    logp, lse, entropy = logits_MV.new_empty(3, rows, dtype=torch.float32)
    if rows:
        temperature_M = logits_MV.new_full((rows,), temperature, dtype=torch.float32)
        pieces = cdiv(vocab, PIECE)
        top, mass, moment = logits_MV.new_empty(3, rows, pieces, dtype=torch.float32)
        _launch_survey(logits_MV, temperature_M, top, mass, moment)
        _log_probs[(rows,)](
            logits_MV, temperature_M, tokens_M.contiguous(), top, mass, moment, logp, lse, entropy, vocab, pieces,
            PIECES=power_of_2(pieces), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return logp, lse, entropy


def log_prob_gradients(
    logits_MV: Tensor, tokens_M: Tensor, lse_M: Tensor, grad_M: Tensor, temperature: float, dtype: torch.dtype
) -> Tensor:
    """d logp / d logits · grad = (onehot(token) − softmax) · grad / T, in `dtype`: in the logits' own memory, if these
    have it already."""
    logits_MV = logits_MV.contiguous()
    rows, vocab = logits_MV.shape
    found = logits_MV if logits_MV.dtype == dtype else torch.empty_like(logits_MV, dtype=dtype)
    if rows:
        _log_prob_gradients[rows, cdiv(vocab, PIECE)](
            logits_MV, tokens_M.contiguous(), lse_M, grad_M.contiguous(), found, temperature, vocab, PIECE=PIECE,
            num_warps=4,
        )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["M", "row_tiles"])
def _linear(
    x_ptr, weight_ptr, bias_ptr, y_ptr, M, V, row_tiles,
    K: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Weights are the product's rows, of which there are always many: so few rows of x are the same instruction's."""
    program = tl.program_id(0)
    m = (program % row_tiles * BM + tl.arange(0, BM)).to(tl.int64)
    v = (program // row_tiles * BV + tl.arange(0, BV)).to(tl.int64)
    k = tl.arange(0, BK)
    product = tl.zeros((BV, BM), tl.float32)
    for start in range(0, K, BK):
        there = (start + k < K)[None, :] if K % BK else True
        weight = tl.load(weight_ptr + v[:, None] * K + start + k, mask=(v < V)[:, None] & there, other=0.0)
        x = tl.load(x_ptr + m[:, None] * K + start + k, mask=(m < M)[:, None] & there, other=0.0)
        product = tl.dot(weight, tl.trans(x), product)
    if bias_ptr is not None:
        product += tl.load(bias_ptr + v, mask=v < V, other=0.0).to(tl.float32)[:, None]
    place = y_ptr + m[None, :] * V + v[:, None]
    tl.store(place, product.to(y_ptr.dtype.element_ty), mask=(v < V)[:, None] & (m < M)[None, :])


@triton.jit
def _survey(
    logits_ptr, temperature_ptr, top_ptr, mass_ptr, moment_ptr, vocab, pieces, PIECE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_start(DEPENDENT)
    await_inputs(DEPENDENT)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = piece * PIECE + tl.arange(0, PIECE)
    x = scaled_logits(logits_ptr, temperature_ptr, row, place, vocab)
    top = tl.max(x, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    tl.store(top_ptr + row * pieces + piece, top)
    mass = tl.exp(x - shift)
    tl.store(mass_ptr + row * pieces + piece, tl.sum(mass, 0))
    if moment_ptr is not None:
        tl.store(moment_ptr + row * pieces + piece, tl.sum(mass * tl.where(mass == 0, 0.0, x - shift), 0))


@triton.jit
def _log_probs(
    logits_ptr, temperature_ptr, tokens_ptr, top_ptr, mass_ptr, moment_ptr, logp_ptr, lse_ptr, entropy_ptr, vocab,
    pieces, PIECES: tl.constexpr,
):  # fmt: skip
    row, p = tl.program_id(0).to(tl.int64), tl.arange(0, PIECES)
    tops, top, masses = masses_of_pieces(top_ptr, mass_ptr, row, pieces, PIECES)
    total = tl.sum(masses, 0)
    logit = scaled_logits(logits_ptr, temperature_ptr, row, tl.load(tokens_ptr + row), vocab)
    tl.store(logp_ptr + row, log_prob(logit, top, total))
    tl.store(lse_ptr + row, top + tl.log(total).to(tl.float32))
    moments = tl.load(moment_ptr + row * pieces + p, mask=p < pieces, other=0.0) * tl.exp(tops - top)
    moments += masses * tl.where(masses == 0, 0.0, tops - top)  # of logits less the largest of the row
    tl.store(entropy_ptr + row, (tl.log(total) - tl.sum(moments, 0) / total).to(tl.float32))


@triton.jit
def _log_prob_gradients(
    logits_ptr, tokens_ptr, lse_ptr, grad_ptr, found_ptr, temperature, vocab, PIECE: tl.constexpr
):  # fmt: skip
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits_ptr + row * vocab + place, mask=place < vocab, other=float("-inf")).to(tl.float32)
    probability = tl.exp(x / temperature - tl.load(lse_ptr + row))
    chosen = tl.where(place == tl.load(tokens_ptr + row), 1.0, 0.0)
    grad = tl.load(grad_ptr + row) / temperature
    tl.store(found_ptr + row * vocab + place, (chosen - probability) * grad, mask=place < vocab)


@triton.jit
def scaled_logits(logits_ptr, temperature_ptr, row, place, vocab):
    temperature = tl.load(temperature_ptr + row)
    x = tl.load(logits_ptr + row * vocab + place, mask=place < vocab, other=float("-inf")).to(tl.float32)
    return x / temperature


@triton.jit
def log_prob(logit, top, total):
    return logit - top - tl.log(total).to(tl.float32)


@triton.jit
def masses_of_pieces(top_ptr, mass_ptr, row, pieces, PIECES: tl.constexpr):
    """(largest logit of each, of all, masses relative to that in float64)."""
    p = tl.arange(0, PIECES)
    tops = tl.load(top_ptr + row * pieces + p, mask=p < pieces, other=float("-inf"))
    top = tl.max(tops, 0)
    masses = tl.load(mass_ptr + row * pieces + p, mask=p < pieces, other=0.0).to(tl.float64)
    masses = tl.where(masses == 0, 0.0, masses * tl.exp(tops - top).to(tl.float64))  # NaN stays, into the log-prob
    return tops, top, masses
