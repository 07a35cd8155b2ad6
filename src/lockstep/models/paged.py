"""Attention over paged KV memory: what the embedded engine calls in place of the model's own attention.

A step's tokens are laid end to end, [1, N]. They fall into segments, one of single-token queries (decode) and one of
chunks (prefill), found by their block table. On a GPU kernels of our own read the pages where they lie; elsewhere each
segment is one padded batch over gathered pages. Nothing is read back within a decode step, so that it can become a CUDA
graph.

Shapes: N tokens, B sequences of a segment, Q longest query, P pages, S page size, H key/value heads, G queries per
key/value head, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from lockstep.models import kernels
from lockstep.models.arguments import refuse_unsupported
from lockstep.models.kv import KVCache, Pages, Spans
from lockstep.models.routing import Routing

if TYPE_CHECKING:
    from lockstep.models.kernels.dealt import Work

NAME = "lockstep_paged"


MEMBERS = 8  # sequences that read common pages together, at most


class Shared(NamedTuple):
    """Neighbours in a segment whose first pages are the same, which are read once for all of them: tensors of [B]."""

    first: Tensor  # of each group, its first sequence
    members: Tensor  # and how many it has, at most MEMBERS; 0 where there are no more groups
    tokens: Tensor  # that they share: whole pages; 0 for a sequence by itself
    before: Tensor  # the same, of each sequence


@dataclass(frozen=True)
class Segment:
    """Sequences of one step that are computed together."""

    rows: slice  # where its tokens stand among the N
    pages: Tensor  # [B, P] page ids
    start: Tensor  # [B] position of each sequence's first query
    count: Tensor | None = None  # [B] queries of each, end to end; None: one each
    longest: int = 1  # largest count
    shared: Shared | None = None  # of single queries; None: everyone reads its own pages
    work: Work | None = None  # of single queries, if their pages were dealt out

    @cached_property
    def lengths(self) -> Tensor:
        """[B] keys that each sequence's first query sees."""
        return self.start + 1

    @cached_property
    def positions(self) -> Tensor:
        """[B, Q] of each query; padding repeats the last."""
        return self.start[:, None] if self.count is None else self.start[:, None] + self._offsets

    @cached_property
    def query_index(self) -> Tensor:
        """[B, Q] into the segment's tokens."""
        return self.spans.first[:, None] + self._offsets

    @cached_property
    def spans(self) -> Spans:
        assert self.count is not None
        return Spans.of(self.start, self.count)

    @cached_property
    def token_index(self) -> Tensor:
        """[tokens] back from the padded [B*Q]."""
        assert self.count is not None
        places = torch.arange(self.longest, device=self.start.device)
        return (places < self.count[:, None]).flatten().nonzero()[:, 0]

    @cached_property
    def _offsets(self) -> Tensor:
        assert self.count is not None
        places = torch.arange(self.longest, device=self.start.device)
        return torch.minimum(places, self.count[:, None] - 1)

    def visible(self, num_keys: int, window: int | None) -> Tensor:
        """[B, 1, Q, keys] bool: keys at or before the query, and within the window if there is one."""
        keys = torch.arange(num_keys, device=self.start.device)
        query = self.positions[:, None, :, None]
        mask = keys <= query
        return mask if window is None else mask & (keys > query - window)


@dataclass(slots=True)
class PagedStep:
    """One engine step, handed to the model's forward as the keyword `lockstep`."""

    cache: KVCache
    slots: Tensor  # [N] where each token's key and value are written: page * S + offset
    segments: list[Segment]
    routing: Routing | None = None  # what the routers of a mixture of experts are told; None: they choose
    calls: list[int] = field(default_factory=list)  # layers that ran, for the self-check
    _masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def mask(self, number: int, window: int | None, dtype: torch.dtype = torch.float32) -> Tensor:
        """What is added to a segment's scores, made once a step and shared by all layers with the same window."""
        if (number, window) not in self._masks:
            segment = self.segments[number]
            visible = segment.visible(segment.pages.shape[1] * self.cache.page_size, window)
            self._masks[number, window] = torch.where(visible, 0.0, -torch.inf).to(dtype)
        return self._masks[number, window]


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, H*G, N, D]
    key: Tensor,  # [1, H, N, D]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    lockstep: PagedStep,
    scaling: float,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    refuse_unsupported(module, attention_mask, dropout, is_causal, extra)
    layer: int = module.layer_idx  # type: ignore[assignment]
    lockstep.cache.layer(layer).store(lockstep.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    return attend(query[0].transpose(0, 1), layer, lockstep, scaling, sliding_window).unsqueeze(0), None


def attend(query_NHD: Tensor, layer: int, step: PagedStep, scaling: float, window: int | None) -> Tensor:
    """[N, H*G, D]. The step's own keys and values are in their pages already."""
    step.calls.append(layer)
    cache = step.cache.layer(layer)
    if kernels.available(query_NHD.device) and supports(cache):
        exact = step.cache.exact
        parts = [_attend_fused(query_NHD[s.rows], cache, s, scaling, window, exact) for s in step.segments]
    else:
        parts = [
            _attend(query_NHD[s.rows], cache, s, step.mask(number, window, query_NHD.dtype), scaling)
            for number, s in enumerate(step.segments)
        ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def supports(cache: Pages) -> bool:
    """The kernels want keys and values of the same size."""
    size = cache.keys.shape[-1]
    return size == cache.values.shape[-1] and kernels.attends(size)


def _attend_fused(
    query: Tensor, cache: Pages, segment: Segment, scaling: float, window: int | None, exact: bool = False
) -> Tensor:
    from lockstep.models.kernels import attention

    query = query.contiguous()
    if segment.count is None:
        if segment.work is not None and window is None:
            from lockstep.models.kernels import dealt

            return dealt.decode(query, cache, segment.pages, segment.work, scaling)
        shared = segment.shared if window is None else None  # what is shared may have left a window
        return attention.decode(query, cache, segment.pages, segment.lengths, scaling, window, shared, exact=exact)
    return attention.prefill(query, cache, segment.pages, segment.spans, segment.longest, scaling, window, exact=exact)


def deal(lengths_B: Tensor, cache: KVCache, num_queries: int) -> Work | None:
    """The pages of a decode step, in shares of about a size; None where no kernel reads them so.

    Between this and the first attention there must be a launch that awaits all before it, as the embedding's does.
    """
    pages = cache.layer(0)
    if cache.exact or pages.keys.dtype != torch.bfloat16 or not kernels.available(lengths_B.device):
        return None
    from lockstep.quant.kernels.triton_tiles import WARP_GROUPS

    if not WARP_GROUPS or not supports(pages):
        return None
    from lockstep.models.kernels import dealt  # Gluon is experimental: nobody else depends on it

    if not dealt.suits(len(lengths_B), pages, num_queries):
        return None
    _, page_size, heads, _ = pages.keys.shape
    return dealt.deal(lengths_B, heads, page_size)


def _attend(query: Tensor, cache: Pages, segment: Segment, mask: Tensor, scaling: float) -> Tensor:
    k, v = cache.gather(segment.pages, query.dtype)
    if segment.count is None:  # one query each: a head's G queries become G rows over the same keys
        folded = query.unflatten(1, (k.shape[1], -1))  # [B, H, G, D]
        mask = mask.expand(-1, -1, folded.shape[2], -1)
        return F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scaling).flatten(1, 2)
    padded = query[segment.query_index].transpose(1, 2)  # [B, H*G, Q, D]
    out = F.scaled_dot_product_attention(padded, k, v, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)[segment.token_index]


AttentionInterface.register(NAME, paged_attention)
