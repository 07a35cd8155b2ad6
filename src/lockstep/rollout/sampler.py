"""From logits to tokens and their log-probs under the distribution really sampled from.

Rows are independent and seeded: a request draws the same uniform numbers whatever else is in the batch. One uniform per
token is drawn by a counter-based generator, u(seed, position), and inverted through the cumulative distribution; all on
the device, no state, no host sync.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.models import kernels
from lockstep.rollout.transfer import send
from lockstep.types import SamplingParams

SMALL, BLOCK = 4096, 128  # tokens
Ints = TypeVar("Ints", Tensor, np.ndarray)  # int64, whose overflow wraps around


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Parameters of the rows that sample in one step. The flags are known to the host, so they may branch."""

    temperature: Tensor  # [B] float32; 1 for greedy rows
    greedy: Tensor  # [B] 0 or 1
    top_k: Tensor  # [B] int64; V where off
    top_p: Tensor  # [B] float32
    min_p: Tensor  # [B] float32
    seed: Tensor  # [B] int64
    position: Tensor  # [B] int64, of the token being drawn
    any_greedy: bool
    any_truncated: bool

    @classmethod
    def of(
        cls, floats: Tensor, ints: Tensor, positions: Tensor, *, any_greedy: bool, any_truncated: bool
    ) -> SamplingBatch:
        """From columns of a SamplingTable, [3, B]."""
        temperature, top_p, min_p = floats
        greedy, top_k, seed = ints
        return cls(temperature, greedy, top_k, top_p, min_p, seed, positions, any_greedy, any_truncated)


class SamplingTable:
    """Sampling parameters by row of the engine, on the device; written once when a request gets its row."""

    def __init__(self, max_rows: int, vocab: int, device: torch.device) -> None:
        self.vocab = vocab
        self.floats = torch.ones(3, max_rows, device=device)  # temperature, top_p, min_p
        self.ints = torch.zeros(3, max_rows, dtype=torch.int64, device=device)  # greedy, top_k, seed
        self._pending: dict[int, SamplingParams] = {}

    def write(self, row: int, params: SamplingParams) -> None:
        """With the next `flush`: one copy for all rows that are new."""
        self._pending[row] = params

    def flush(self) -> None:
        if not self._pending:
            return
        device, chosen = self.floats.device, self._pending.values()
        floats = [[p.temperature or 1.0, p.top_p, p.min_p] for p in chosen]
        ints = [[p.temperature == 0, min(p.top_k or self.vocab, self.vocab), _signed(p.seed)] for p in chosen]
        rows = send(list(self._pending), device)
        self.floats[:, rows] = send(floats, device, np.float32).T
        self.ints[:, rows] = send(ints, device).T
        self._pending.clear()

    def batch(self, rows: Tensor, positions: Tensor, *, any_greedy: bool, any_truncated: bool) -> SamplingBatch:
        floats, ints = self.floats.index_select(1, rows), self.ints.index_select(1, rows)
        return SamplingBatch.of(floats, ints, positions, any_greedy=any_greedy, any_truncated=any_truncated)


def truncated(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def sample(logits_BV: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """(token, log-prob) of each row. Greedy rows take the first largest logit, scored at temperature 1."""
    temperature = batch.temperature
    if batch.any_truncated:
        logits_BV = truncate(logits_BV.float() / temperature[:, None], batch)
        temperature = torch.ones_like(temperature)
    if kernels.available(logits_BV.device):
        from lockstep.rollout.kernels import draw

        return draw(logits_BV, temperature, batch.greedy, batch.seed, batch.position)
    x_BV = logits_BV.float() / temperature[:, None]
    top = x_BV.amax(-1, keepdim=True)
    tokens, mass = _invert((x_BV - top).exp_(), uniform(batch.seed, batch.position))
    if batch.any_greedy:
        tokens = torch.where(batch.greedy != 0, logits_BV.argmax(-1), tokens)
    return tokens, (x_BV.gather(-1, tokens[:, None]) - top)[:, 0] - mass.log().float()


def _invert(weights_BV: Tensor, u_B: Tensor) -> tuple[Tensor, Tensor]:
    """[B] the token at which the cumulative distribution passes u, and the sum of weights in float64. Of a large
    vocabulary first the block of tokens is found, then the token in it: a running sum over everything is slow. Masses
    of blocks are float32, so that a draw can differ from the plain sum's where u lands within 1e-7 of a token's
    bound."""
    if weights_BV.shape[-1] <= SMALL:
        cdf_BV = weights_BV.cumsum(-1, dtype=torch.float64)
        return _first_above(cdf_BV, u_B * cdf_BV[:, -1]), cdf_BV[:, -1]
    vocab = weights_BV.shape[-1]
    if missing := -vocab % BLOCK:
        weights_BV = F.pad(weights_BV, (0, missing))
    blocks = weights_BV.unflatten(-1, (-1, BLOCK))
    upto = blocks.sum(-1).double().cumsum(-1)  # [B, blocks]
    threshold = u_B * upto[:, -1]
    block = _first_above(upto, threshold)
    before = F.pad(upto, (1, 0)).gather(1, block[:, None])[:, 0]
    within = blocks[torch.arange(len(block), device=block.device), block].double().cumsum(-1)
    return (block * BLOCK + _first_above(within, threshold - before)).clamp(max=vocab - 1), upto[:, -1]


def _first_above(cdf: Tensor, threshold: Tensor) -> Tensor:
    """Never of zero mass, however the sums were rounded. NaN gives the last; its log-prob is NaN then, which learning
    refuses."""
    total = cdf[:, -1]
    threshold = torch.minimum(threshold, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, threshold[:, None], right=True)[:, 0].clamp(max=cdf.shape[-1] - 1)


def truncate(logits_BV: Tensor, batch: SamplingBatch) -> Tensor:
    """−inf outside the kept set: the top_k largest, of them the fewest with mass top_p, none below min_p·largest."""
    ordered, order = logits_BV.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(-1)
    rank = torch.arange(logits_BV.shape[-1], device=logits_BV.device)
    keep = rank < batch.top_k[:, None]
    mass = (probs * keep).sum(-1, keepdim=True)
    before = (probs.cumsum(-1) - probs) / mass  # mass of the larger ones, within the top_k
    top_p = batch.top_p[:, None]
    keep &= (before < top_p) | (top_p >= 1)  # off is off: `before` may round to 1 in the tail
    keep &= probs >= batch.min_p[:, None] * probs[:, :1]
    keep[:, 0] = True
    return torch.full_like(logits_BV, -torch.inf).scatter(-1, order, ordered.masked_fill(~keep, -torch.inf))


def uniform(seed: Tensor, counter: Tensor) -> Tensor:
    """float64 in [0, 1) from (seed, counter), by two rounds of the splitmix64 finaliser."""
    if seed.device.type == "cpu":  # numpy's operators take a fraction of the time to call
        return torch.from_numpy(_bits(seed.numpy(), counter.numpy()) * 2.0**-53)
    return _bits(seed, counter).double() * 2.0**-53


def _bits(seed: Ints, counter: Ints) -> Ints:
    """53 random ones."""
    mixed = _mix(_mix(seed) + counter * _signed(0x9E3779B97F4A7C15))
    return mixed >> 11 & (1 << 53) - 1


def _mix(z: Ints) -> Ints:
    z = z + _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: Ints, bits: int) -> Ints:
    """Logical right shift; that of int64 drags the sign along."""
    return z >> bits & (1 << 64 - bits) - 1


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
