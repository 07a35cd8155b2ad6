"""Sampling from large vocabularies in Triton: the logits are read once and never sorted, written or made float32.

First every piece of a row's vocabulary reports its largest logit and its mass (`models/kernels/output.py`); then the
piece that the uniform number falls into, or the largest logit, is searched. The same inversion of the cumulative
distribution as `sampler.sample`; the masses of pieces add up in float64, those within a piece in float32, so a draw can
differ from the torch code's where u lands within 1e-7 of a token's bound.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.models.kernels.output import PIECE, log_prob, masses_of_pieces, scaled_logits, survey
from lockstep.quant.kernels.triton_tiles import DEPENDENT, await_inputs, let_next_start, power_of_2


def draw(
    logits_BV: Tensor, temperature_B: Tensor, greedy_B: Tensor, seed_B: Tensor, position_B: Tensor
) -> tuple[Tensor, Tensor]:
    """(token, log-prob) of each row; greedy rows take the first largest logit."""
    logits_BV = logits_BV.contiguous()
    batch, vocab = logits_BV.shape
    top, mass = survey(logits_BV, temperature_B)
    pieces = top.shape[1]
    tokens = logits_BV.new_empty(batch, dtype=torch.int64)
    logp = logits_BV.new_empty(batch, dtype=torch.float32)
    _pick[(batch,)](
        logits_BV, temperature_B, greedy_B, seed_B.contiguous(), position_B, top, mass, tokens, logp, vocab, pieces,
        PIECE=PIECE, PIECES=power_of_2(pieces), DEPENDENT=DEPENDENT, launch_pdl=DEPENDENT, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return tokens, logp


GOLDEN, FIRST, SECOND = (tl.constexpr(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@triton.jit
def _uniform(seed, position):
    """`sampler.uniform`."""
    mixed = _mix(_mix(seed.to(tl.uint64)) + position.to(tl.uint64) * GOLDEN)
    return (mixed >> 11).to(tl.float64) * 2.0**-53


@triton.jit
def _mix(z):
    z = z + GOLDEN
    z = (z ^ (z >> 30)) * FIRST
    z = (z ^ (z >> 27)) * SECOND
    return z ^ (z >> 31)


@triton.jit
def _pick(
    logits_ptr, temperature_ptr, greedy_ptr, seed_ptr, position_ptr, top_ptr, mass_ptr, tokens_ptr, logp_ptr,
    vocab, pieces, PIECE: tl.constexpr, PIECES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_start(DEPENDENT)
    await_inputs(DEPENDENT)
    row, p = tl.program_id(0).to(tl.int64), tl.arange(0, PIECES)
    tops, top, masses = masses_of_pieces(top_ptr, mass_ptr, row, pieces, PIECES)
    below = tl.cumsum(masses, 0)
    total = tl.sum(masses, 0)
    target = _uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row)) * total
    last = tl.max(tl.where(masses > 0, p, 0), 0)
    piece = tl.minimum(tl.sum((below <= target).to(tl.int32), 0), last)
    rest = (target - tl.sum(tl.where(p < piece, masses, 0.0), 0)).to(tl.float32)

    greedy = tl.load(greedy_ptr + row) != 0
    piece = tl.where(greedy, tl.argmax(tops, 0), piece)
    place = piece * PIECE + tl.arange(0, PIECE)
    x = scaled_logits(logits_ptr, temperature_ptr, row, place, vocab)
    weight = tl.exp(x - top)
    before = tl.sum((tl.cumsum(weight, 0) <= rest).to(tl.int32), 0)
    drawn = tl.minimum(piece * PIECE + before, tl.max(tl.where(weight > 0, place, 0), 0))
    token = tl.where(greedy, tl.min(tl.where(x == top, place, vocab - 1), 0), drawn)
    logit = scaled_logits(logits_ptr, temperature_ptr, row, token, vocab)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(logp_ptr + row, log_prob(logit, top, total))
