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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig

from lockstep.models import kernels
from lockstep.models.arguments import refuse_unsupported
from lockstep.models.routing import Routing

NAME = "lockstep_paged"


class KVCache:
    """Keys and values of all layers, by page: [layers][pages, S, H, D]."""

    def __init__(
        self, config: PreTrainedConfig, *, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        text = config.get_text_config()
        heads, key_size, value_size = kv_shape(text)
        self.page_size = page_size
        self.num_pages = num_pages
        shape = (text.num_hidden_layers, num_pages, page_size, heads)
        self.keys = torch.zeros(*shape, key_size, dtype=dtype, device=device)
        self.values = torch.zeros(*shape, value_size, dtype=dtype, device=device)


def kv_shape(text: Any) -> tuple[int, int, int]:
    """(heads, key size, value size) of what a text config's layers hand to the attention function."""
    if getattr(text, "kv_lora_rank", None):  # latent attention, expanded before it is called (DeepSeek)
        return text.num_attention_heads, text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return getattr(text, "num_key_value_heads", None) or text.num_attention_heads, size, size


@dataclass(frozen=True)
class Segment:
    """Sequences of one step that are computed together."""

    rows: slice  # where its tokens stand among the N
    pages: Tensor  # [B, P] page ids
    start: Tensor  # [B] position of each sequence's first query
    count: Tensor | None = None  # [B] queries of each, end to end; None: one each
    longest: int = 1  # largest count

    @cached_property
    def positions(self) -> Tensor:
        """[B, Q] of each query; padding repeats the last."""
        return self.start[:, None] + self._offsets

    @cached_property
    def query_index(self) -> Tensor:
        """[B, Q] into the segment's tokens."""
        assert self.count is not None
        return (self.count.cumsum(0) - self.count)[:, None] + self._offsets

    @cached_property
    def token_index(self) -> Tensor:
        """[tokens] back from the padded [B*Q]."""
        assert self.count is not None
        places = torch.arange(self.longest, device=self.start.device)
        return (places < self.count[:, None]).flatten().nonzero()[:, 0]

    @cached_property
    def _offsets(self) -> Tensor:
        places = torch.arange(self.longest, device=self.start.device)
        return places if self.count is None else torch.minimum(places, self.count[:, None] - 1)

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

    def mask(self, number: int, window: int | None) -> Tensor:
        """The mask of a segment, made once a step and shared by all layers with the same window."""
        if (number, window) not in self._masks:
            segment = self.segments[number]
            self._masks[number, window] = segment.visible(segment.pages.shape[1] * self.cache.page_size, window)
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
    keys, values = lockstep.cache.keys[layer], lockstep.cache.values[layer]
    keys.flatten(0, 1).index_copy_(0, lockstep.slots, key[0].transpose(0, 1))
    values.flatten(0, 1).index_copy_(0, lockstep.slots, value[0].transpose(0, 1))
    return attend(query[0].transpose(0, 1), layer, lockstep, scaling, sliding_window).unsqueeze(0), None


def attend(query_NHD: Tensor, layer: int, step: PagedStep, scaling: float, window: int | None) -> Tensor:
    """[N, H*G, D]. The step's own keys and values are in their pages already."""
    step.calls.append(layer)
    keys, values = step.cache.keys[layer], step.cache.values[layer]
    if kernels.available(keys.device) and supports(keys, values):
        parts = [_attend_fused(query_NHD[s.rows], keys, values, s, scaling, window) for s in step.segments]
    else:
        masks = (step.mask(number, window) for number in range(len(step.segments)))
        segments = zip(step.segments, masks, strict=True)
        parts = [_attend(query_NHD[s.rows], keys, values, s, mask, scaling) for s, mask in segments]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def supports(keys: Tensor, values: Tensor) -> bool:
    """The kernels want heads whose size is a power of two of at least 16, the same for keys and values."""
    size = keys.shape[-1]
    return size == values.shape[-1] and size >= 16 and size & (size - 1) == 0


def _attend_fused(
    query: Tensor, keys: Tensor, values: Tensor, segment: Segment, scaling: float, window: int | None
) -> Tensor:
    from lockstep.models.kernels import attention

    query = query.contiguous()
    if segment.count is None:
        return attention.decode(query, keys, values, segment.pages, segment.start + 1, scaling, window)
    return attention.prefill(
        query, keys, values, segment.pages, segment.start, segment.count, segment.longest, scaling, window
    )


def _attend(query: Tensor, keys: Tensor, values: Tensor, segment: Segment, mask: Tensor, scaling: float) -> Tensor:
    k, v = (_gather(cache, segment.pages).transpose(1, 2) for cache in (keys, values))  # [B, H, P*S, D]
    if segment.count is None:  # one query each: a head's G queries become G rows over the same keys
        folded = query.unflatten(1, (k.shape[1], -1))  # [B, H, G, D]
        mask = mask.expand(-1, -1, folded.shape[2], -1)
        return F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scaling).flatten(1, 2)
    padded = query[segment.query_index].transpose(1, 2)  # [B, H*G, Q, D]
    out = F.scaled_dot_product_attention(padded, k, v, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)[segment.token_index]


def _gather(cache: Tensor, pages: Tensor) -> Tensor:
    """[B, P*S, H, D]: whole pages, copied as rows: on a CPU faster than indexing by a matrix."""
    chosen = cache.flatten(1).index_select(0, pages.flatten())
    return chosen.view(pages.shape[0], -1, *cache.shape[2:])


AttentionInterface.register(NAME, paged_attention)
