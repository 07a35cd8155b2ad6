"""Memory for keys and values, in pages: as they are, or in 8 bits.

Shapes: N tokens, B sequences, P pages, S page size, H key/value heads, D head size.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from lockstep.models.releasable import Releasable

LARGEST_E4M3 = 448.0
PAGE_SIZE = 16  # tokens, of the engine's pages


class Pages(NamedTuple):
    """Keys and values of one layer, [P, S, H, D]; 8-bit ones have a scale for each head of each token, [P, H, S]: who
    reads a head of a page reads its scales at once."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None

    def store(self, slots_N: Tensor, key_NHD: Tensor, value_NHD: Tensor) -> None:
        for memory, scales, vectors in zip(self[:2], self[2:], (key_NHD, value_NHD), strict=True):
            if scales is not None:
                vectors, scale = _encode(vectors)
                scales.mT[slots_N // scales.shape[2], slots_N % scales.shape[2]] = scale
                memory, vectors = memory.view(torch.uint8), vectors.view(torch.uint8)
            memory.flatten(0, 1).index_copy_(0, slots_N, vectors)

    def gather(self, pages_BP: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values, [B, H, P*S, D] each."""
        key, value = (_gather(m, s, pages_BP, dtype).transpose(1, 2) for m, s in zip(self[:2], self[2:], strict=True))
        return key, value


class Spans(NamedTuple):
    """Whose queries are which, where those of several sequences are laid end to end; [B] each."""

    first: Tensor  # where a sequence's queries begin
    start: Tensor  # position of the first of them
    size: Tensor

    @staticmethod
    def of(start: Tensor, count: Tensor) -> Spans:
        return Spans(count.cumsum(0) - count, start.contiguous(), count.contiguous())


def _encode(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes and the scale of each vector: its largest magnitude becomes the format's. NaN makes the scale NaN."""
    largest = vectors.float().abs().amax(-1)
    scale = torch.where(largest == 0, 1.0, largest / LARGEST_E4M3)
    return (vectors.float() / scale[..., None]).to(torch.float8_e4m3fn), scale


def _gather(memory: Tensor, scales: Tensor | None, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, P*S, H, D]: whole pages, copied as rows: on a CPU faster than indexing by a matrix."""
    shape = (pages.shape[0], -1, *memory.shape[2:])
    if scales is None:
        return memory.flatten(1).index_select(0, pages.flatten()).view(shape)
    codes = memory.flatten(1).view(torch.uint8).index_select(0, pages.flatten()).view(memory.dtype).view(shape)
    scale = scales.index_select(0, pages.flatten()).mT.reshape(codes.shape[:-1])
    return (codes.float() * scale[..., None]).to(dtype)


class KVCache:
    """Keys and values of all layers, by page."""

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        memory: Releasable | None = None,
        exact: bool = False,
    ) -> None:
        """In `memory`, if it is to be given back at times. `exact`: who attends to it sums up as the learner does, to
        the last bit."""
        text = config.get_text_config()
        heads, key_size, value_size = kv_shape(text)
        self.exact = exact
        self.page_size = page_size
        self.num_pages = num_pages
        shape = (text.num_hidden_layers, num_pages, page_size, heads)
        zeros = partial(torch.zeros, device=device) if memory is None else memory.zeros
        self.keys = zeros(*shape, key_size, dtype=dtype)
        self.values = zeros(*shape, value_size, dtype=dtype)
        by_head = (text.num_hidden_layers, num_pages, heads, page_size)
        self.scales = zeros(2, *by_head, dtype=torch.float32) if dtype == torch.float8_e4m3fn else None
        self._layers = [self._pages(number) for number in range(text.num_hidden_layers)]

    def layer(self, number: int) -> Pages:
        return self._layers[number]

    def _pages(self, number: int) -> Pages:
        scales = (None, None) if self.scales is None else (self.scales[0, number], self.scales[1, number])
        return Pages(self.keys[number], self.values[number], *scales)

    @staticmethod
    def slot_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
        """What a token takes, of all layers."""
        text = config.get_text_config()
        heads, key_size, value_size = kv_shape(text)
        scale_bytes = 2 * torch.float32.itemsize if dtype == torch.float8_e4m3fn else 0
        return text.num_hidden_layers * heads * ((key_size + value_size) * dtype.itemsize + scale_bytes)


def kv_shape(text: Any) -> tuple[int, int, int]:
    """(heads, key size, value size) of what a text config's layers hand to the attention function."""
    if getattr(text, "kv_lora_rank", None):  # latent attention, expanded before it is called (DeepSeek)
        return text.num_attention_heads, text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return getattr(text, "num_key_value_heads", None) or text.num_attention_heads, size, size
