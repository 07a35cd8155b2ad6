"""Attention over sequences laid end to end, for the learner: no sequence ever sees another.

Registered in transformers under the name `lockstep_varlen` and fed by one forward argument, `lockstep=Packed(…)`.
No mask function is registered under that name, so transformers builds no mask: the lengths alone separate sequences.

Tokens that sequences share (a prompt with several answers) go through the model once and are spread out only here.

Shapes: N tokens of the sequences, K of them that run, P padded places, B sequences of a bucket, L its longest,
H heads, D head width. Without sharing K = N.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from lockstep.models import kernels
from lockstep.models.arguments import refuse_unsupported
from lockstep.models.kv import Pages, Spans
from lockstep.models.routing import Routing

NAME = "lockstep_varlen"
LARGEST_HEAD = 256  # of flash attention's backward


@dataclass(frozen=True, slots=True)
class Shared:
    """Which tokens run through the model when sequences begin alike."""

    kept: Tensor  # [K] the tokens that run
    spread: Tensor  # [N] for every token, the one of the K that stands for it

    @staticmethod
    def of(first: Tensor) -> Shared:
        """From `Batch.shared`, the first place with the same token and past."""
        kept = (first == torch.arange(len(first), device=first.device)).nonzero().squeeze(1)
        rank = torch.zeros_like(first).index_copy_(0, kept, torch.arange(len(kept), device=first.device))
        return Shared(kept, rank[first])


@dataclass(kw_only=True)
class Packed:
    """What one forward of packed sequences needs to know; `calls` counts the attention layers that used it."""

    cu_seqlens: Tensor  # [B+1] int32, of the sequences in full
    max_seqlen: int
    shared: Shared | None = None
    routing: Routing | None = None  # what the routers of a mixture of experts are told; None: they choose
    calls: int = field(default=0)

    @cached_property
    def pages(self) -> Tensor:
        """[B, L] where the tokens of each sequence stand among the K; behind its end, anywhere."""
        places = torch.arange(self.max_seqlen, device=self.cu_seqlens.device)
        tokens = (self.cu_seqlens[:-1, None] + places).clamp_(max=self.cu_seqlens[-1] - 1)
        return tokens.long() if self.shared is None else self.shared.spread[tokens]

    @cached_property
    def spans(self) -> Spans:
        begins = self.cu_seqlens[:-1]
        return Spans(begins, torch.zeros_like(begins), self.cu_seqlens.diff())

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.cu_seqlens, self.shared)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where every token goes when sequences are right-padded into buckets of similar length."""

    gather: Tensor  # [P] which of the K fills a place; padding repeats one, which no real token attends to
    places: Tensor  # [N] the place of every token
    take: Tensor  # [K] the place a token's result is taken from
    spread: Tensor | None  # [N] as in Shared
    buckets: tuple[tuple[int, int], ...]  # (sequences, longest) of each bucket, in the order of places
    dense: bool  # nothing is padded, moved or shared

    @staticmethod
    def of(cu_seqlens: Tensor, shared: Shared | None) -> Layout:
        offsets: list[int] = cu_seqlens.tolist()
        lengths = [end - start for start, end in pairwise(offsets)]
        buckets, places, first = [], torch.empty(offsets[-1], dtype=torch.long), 0
        for members in group_lengths(lengths):
            longest = lengths[members[0]]
            for slot, i in enumerate(members):
                start = first + slot * longest
                places[offsets[i] : offsets[i + 1]] = torch.arange(start, start + lengths[i])
            buckets.append((len(members), longest))
            first += len(members) * longest
        gather = torch.zeros(first, dtype=torch.long)
        gather[places] = torch.arange(len(places))
        gather, places = gather.to(cu_seqlens.device), places.to(cu_seqlens.device)
        if shared is None:
            return Layout(gather, places, places, None, tuple(buckets), len(set(lengths)) == 1)
        return Layout(shared.spread[gather], places, places[shared.kept], shared.spread, tuple(buckets), False)


def group_lengths(lengths: Sequence[int], waste: float = 0.5, floor: int = 64) -> list[list[int]]:
    """Sequences by falling length, in buckets whose shortest is at least `waste` of the longest, or under `floor`."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for i in order:
        if groups and lengths[i] >= min(waste * lengths[groups[-1][0]], lengths[groups[-1][0]] - floor):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def attention(
    module: nn.Module,
    query: Tensor,  # [1, H, K, D]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    lockstep: Packed | None = None,
    exact: bool = False,
    **extra: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in every layer; returns [1, K, H, D]. `exact`: summed up as by such an engine."""
    if lockstep is None:
        raise ValueError(f"{NAME} needs the forward argument `lockstep`: call the learner's model through `score`")
    refuse_unsupported(module, attention_mask, dropout, is_causal, extra)
    lockstep.calls += 1
    window = sliding_window if sliding_window is not None and sliding_window < lockstep.max_seqlen else None
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [K, H, D]
    size = q.shape[-1]
    fast = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and size == v.shape[-1]
    if fast and kernels.available(q.device) and follows_engine(size):
        scale = size**-0.5 if scaling is None else scaling
        return _AsTheEngine.apply(q, k, v, lockstep, scale, window, exact).unsqueeze(0), None
    assert not exact, "refused when the module was made exact"
    run = _fused if fast else _padded
    return run(q, k, v, lockstep, scaling, window).unsqueeze(0), None


def follows_engine(size: int) -> bool:
    """Whether the engine's kernel, and flash attention's backward, take heads of that size."""
    return kernels.attends(size) and size <= LARGEST_HEAD


class _AsTheEngine(torch.autograd.Function):
    """Forward the engine's kernel, so that weights of values are rounded as they were in sampling; backward flash
    attention's."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float, window: int | None, exact: bool
    ) -> Tensor:
        from lockstep.models.kernels.attention import prefill

        shared = packed.shared
        k, v = k.contiguous(), v.contiguous()
        query = q.contiguous() if shared is None else q.index_select(0, shared.spread)
        lse = query.new_empty(query.shape[1], len(query), dtype=torch.float32)
        cache = Pages(k[:, None], v[:, None], None, None)  # a token is a page
        out = prefill(query, cache, packed.pages, packed.spans, packed.max_seqlen, scale, window, lse, exact=exact)
        ctx.save_for_backward(query, k, v, out, lse)
        ctx.packed, ctx.scale, ctx.window = packed, scale, window
        return out if shared is None else out.index_select(0, shared.kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, k, v, out, lse = ctx.saved_tensors
        cu, longest, shared = ctx.packed.cu_seqlens, ctx.packed.max_seqlen, ctx.packed.shared
        grad, num_kept = grads[0].contiguous(), len(k)
        if shared is not None:
            grad = torch.zeros_like(out).index_copy_(0, shared.kept, grad)
            k, v = (x.index_select(0, shared.spread) for x in (k, v))
        unused, left = grad.new_empty(2, dtype=torch.uint64), -1 if ctx.window is None else ctx.window - 1
        found = torch.ops.aten._flash_attention_backward(
            grad, query, k, v, out, lse, cu, cu, longest, longest, 0.0, ctx.window is None, unused, unused,
            scale=ctx.scale, window_size_left=left, window_size_right=0,
        )  # fmt: skip
        if shared is not None:
            found = [x.new_zeros(num_kept, *x.shape[1:]).index_add_(0, shared.spread, x) for x in found]
        return *found, *(None,) * 4


def _fused(q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float | None, window: int | None) -> Tensor:
    """PyTorch's variable-length flash attention."""
    from torch.nn.attention.varlen import varlen_attn

    cu, shared = packed.cu_seqlens, packed.shared
    if shared is not None:
        q, k, v = (x.index_select(0, shared.spread) for x in (q, k, v))
    repeat = q.shape[1] // k.shape[1]
    options = _fused_options(frozenset(inspect.signature(varlen_attn).parameters), window)
    if "enable_gqa" in options:
        options["enable_gqa"] = repeat > 1
    elif repeat > 1:
        k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
    out = varlen_attn(q, k, v, cu, cu, packed.max_seqlen, packed.max_seqlen, scale=scale, **options)
    assert isinstance(out, Tensor)
    return out if shared is None else out.index_select(0, shared.kept)


def _fused_options(parameters: frozenset[str], window: int | None) -> dict[str, Any]:
    """How this release of torch spells causality, the window and grouped heads."""
    options: dict[str, Any] = {"enable_gqa": False} if "enable_gqa" in parameters else {}
    if "window_size" in parameters:
        return options | {"window_size": (-1 if window is None else window - 1, 0)}
    if window is not None:
        raise ValueError("this release of torch has no sliding window in varlen_attn; torch >= 2.11 does")
    return options | {"is_causal": True}


def _padded(q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float | None, window: int | None) -> Tensor:
    """One causal SDPA per bucket. Padding is on the right, so causality alone keeps it out of sight."""
    layout = packed.layout
    q, k, v = (x if layout.dense else _Pad.apply(x, layout) for x in (q, k, v))
    sizes = [num * longest for num, longest in layout.buckets]
    pieces = zip(*(x.split(sizes) if len(sizes) > 1 else [x] for x in (q, k, v)), layout.buckets, strict=True)
    parts = [_bucket(q, k, v, longest, scale, window) for q, k, v, (_, longest) in pieces]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out if layout.dense else _Unpad.apply(out, layout.take)


def _bucket(q: Tensor, k: Tensor, v: Tensor, longest: int, scale: float | None, window: int | None) -> Tensor:
    q, k, v = (x.unflatten(0, (-1, longest)).transpose(1, 2) for x in (q, k, v))  # [B, H, L, D]
    if window is not None and window < longest:
        place = torch.arange(longest, device=q.device)
        distance = place[:, None] - place
        masked: dict[str, Any] = {"attn_mask": (distance >= 0) & (distance < window)}
    else:
        masked = {"is_causal": True}
    out = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1], **masked)
    return out.transpose(1, 2).flatten(0, 1)


class _Pad(torch.autograd.Function):
    """[K, …] to [P, …]. Padding never influences a real token, so its gradient is dropped unread."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout) -> Tensor:
        ctx.layout, ctx.tokens = layout, len(x)
        return x.index_select(0, layout.gather)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        real = grads[0].index_select(0, ctx.layout.places)
        if ctx.layout.spread is None:
            return real, None
        return real.new_zeros(ctx.tokens, *real.shape[1:]).index_add_(0, ctx.layout.spread, real), None


class _Unpad(torch.autograd.Function):
    """[P, …] to [K, …]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, take: Tensor) -> Tensor:
        ctx.save_for_backward(take)
        ctx.places = x.shape[0]
        return x.index_select(0, take)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        padded = grads[0].new_zeros(ctx.places, *grads[0].shape[1:])
        return padded.index_copy_(0, ctx.saved_tensors[0], grads[0]), None


AttentionInterface.register(NAME, attention)
