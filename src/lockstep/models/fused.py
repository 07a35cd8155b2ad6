"""Decoder layers with fewer launches: the same modules and weights, other forwards.

The engine's view of a model keeps its classes, names and tensors. Where a part is of a kind we know, its forward is
replaced: norms become one kernel, q/k/v and gate/up one product each; head norms, rotation and the write into the pages
one kernel; experts with few rows each run products of our own. Whatever else a model has runs as transformers wrote it.
The self-check holds the result against plain transformers.

One product of several weights needs them to lie side by side: `lay_together` moves them there once. Each is a view of
the common memory from then on, so that copies into it, and updates in place, reach the product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lockstep.models import kernels
from lockstep.models.arguments import refuse_unsupported
from lockstep.models.kv import kv_shape
from lockstep.models.paged import PagedStep, attend
from lockstep.quant.encoded import Encoded
from lockstep.quant.layers import is_fused_experts
from lockstep.quant.modules import LowBitLinear, use_experts_function

FAMILIES = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe")
ATTENTION = frozenset(f"{family}Attention" for family in FAMILIES)  # project, norm heads or not, rotate halves, attend
WINDOW_OF_CONFIG = frozenset({"MistralAttention", "MixtralAttention"})  # the same in all layers
MLP = frozenset(f"{family}MLP" for family in FAMILIES)
LAYER = frozenset(f"{family}DecoderLayer" for family in FAMILIES)  # norm, attend, add, norm, compute, add
NORM = frozenset(f"{family}RMSNorm" for family in FAMILIES)
SILU = frozenset({"SiLU", "SiLUActivation"})
EXPERTS = "lockstep_engine"
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

Product = Callable[[Tensor], Tensor]


def fuse(view: PreTrainedModel) -> None:
    """Replaces the forwards of a view that calls the paged attention; does nothing where the kernels cannot run."""
    _, key_size, value_size = kv_shape(view.config.get_text_config())
    if not kernels.available(view.device) or key_size != value_size or key_size & (key_size - 1):
        return
    for part in view.modules():
        kind = type(part).__name__
        if kind in ATTENTION:
            part.forward = partial(_attention, part, product(part, TOGETHER[0]))
        elif kind in MLP and type(part.act_fn).__name__ in SILU:
            part.forward = partial(_mlp, part, product(part, TOGETHER[1]))
        elif kind in NORM:
            part.forward = partial(_norm, part)
        elif kind in LAYER:
            part.forward = partial(_layer, part)
        elif is_fused_experts(part):
            use_experts_function(part, EXPERTS)


def lay_together(module: nn.Module) -> None:
    """Puts the weights, and the biases, of linear layers that share their input into common memory."""
    for part in module.modules():
        for names in TOGETHER:
            linears = [child for name in names if type(child := getattr(part, name, None)) is nn.Linear]
            if len(linears) == len(names):
                _join([linear.weight for linear in linears])
                if all(linear.bias is not None for linear in linears):
                    _join([linear.bias for linear in linears])


def _join(parameters: Sequence[Tensor]) -> None:
    """Once: whoever already shares the common memory would lose sight of weights that moved again."""
    if joined(parameters) is not None:
        return
    whole = torch.cat([p.data for p in parameters])
    for parameter, piece in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = piece


def joined(parameters: Sequence[Tensor]) -> Tensor | None:
    """Their common memory as one tensor; None if they do not lie side by side."""
    first, storage = parameters[0], parameters[0].untyped_storage().data_ptr()
    expected = first.data_ptr()
    for p in parameters:
        if p.data_ptr() != expected or p.untyped_storage().data_ptr() != storage or not p.is_contiguous():
            return None
        expected += p.numel() * p.element_size()
    return first.data.as_strided((sum(map(len, parameters)), *first.shape[1:]), first.stride())


def product(part: nn.Module, names: Sequence[str]) -> Product:
    """x to the results of several linear layers, one after the other: one product if their weights allow it."""
    linears: list[Any] = [part.get_submodule(name) for name in names]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    bias = joined(biases) if len(biases) == len(linears) else None
    if (bias is None) == (not biases):
        if all(type(linear) is nn.Linear for linear in linears):
            weight = joined([linear.weight for linear in linears])
            if weight is not None:
                return lambda x: F.linear(x, weight, bias)
        if all(type(linear) is LowBitLinear for linear in linears):
            encoded, format = joined_low_bit(linears), linears[0].weight.format
            if encoded is not None:
                return lambda x: format.linear(x, encoded, bias)
    return lambda x: torch.cat([linear(x) for linear in linears], -1)


def joined_low_bit(linears: Sequence[LowBitLinear]) -> Encoded | None:
    """The same for weights in low bits, which encode their common input once."""
    weights = [linear.weight.encoded for linear in linears]
    codes, scales = joined([weight.codes for weight in weights]), joined([weight.scales for weight in weights])
    if codes is None or scales is None:
        return None
    return Encoded(codes, scales, (len(codes), weights[0].shape[1]))


def _layer(self: Any, hidden_states: Tensor, **arguments: Any) -> Tensor:
    from lockstep.models.kernels.pointwise import add_rms_norm

    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **arguments)
    norm = self.post_attention_layernorm
    residual, normed = add_rms_norm(attended, hidden_states, norm.weight, norm.variance_epsilon)
    computed = self.mlp(normed)
    return residual + computed


def _attention(
    self: Any,
    qkv: Product,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    *,
    lockstep: PagedStep,
    **extra: Any,
) -> tuple[Tensor, None]:
    from lockstep.models.kernels.pointwise import rotate_and_store

    refuse_unsupported(self, attention_mask, 0.0, None, extra)
    norms = (self.q_norm.weight, self.k_norm.weight) if hasattr(self, "q_norm") else None
    eps = self.q_norm.variance_epsilon if norms else 0.0
    cache = lockstep.cache.layer(self.layer_idx)
    query = rotate_and_store(qkv(hidden_states[0]), norms, eps, position_embeddings, lockstep.slots, cache)
    out = attend(query, self.layer_idx, lockstep, self.scaling, window(self))
    return self.o_proj(out.flatten(1)[None]), None


def window(attention: Any) -> int | None:
    """What its class hands to the attention function: the model's window, the layer's own, or none."""
    owner = attention.config if type(attention).__name__ in WINDOW_OF_CONFIG else attention
    return getattr(owner, "sliding_window", None)


def _mlp(self: Any, gate_up: Product, x: Tensor) -> Tensor:
    from lockstep.models.kernels.pointwise import gated_silu

    return self.down_proj(gated_silu(gate_up(x)))


def _experts(self: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Few rows for each expert: our kernels, which can be captured. Many, as in prefill: the library's."""
    from lockstep.models.kernels import experts
    from lockstep.models.kernels.pointwise import gated_silu

    num_experts, top_k = len(self.gate_up_proj), top_k_index.shape[1]
    if top_k_index.numel() > experts.MOST_ROWS * num_experts and hidden.dtype == torch.bfloat16:
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, hidden, top_k_index, top_k_weights)
    order, offsets = experts.group(top_k_index, num_experts)
    up = experts.product(hidden, self.gate_up_proj, order, offsets, top_k, gather=True)
    plain = type(self.act_fn).__name__ in SILU and self._apply_gate.__name__ == "_default_apply_gate"
    gated = gated_silu(up) if plain else self._apply_gate(up)
    down = experts.product(gated, self.down_proj, order, offsets, top_k, gather=False)
    return experts.combine(down, top_k_weights)


def _norm(self: Any, x: Tensor) -> Tensor:
    from lockstep.models.kernels.pointwise import rms_norm

    return rms_norm(x, self.weight, self.variance_epsilon)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
