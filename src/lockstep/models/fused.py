"""Decoder layers with fewer launches: the same modules and weights, other forwards.

The engine's view of a model keeps its classes, names and tensors. Where a part is of a kind we know, its forward is
replaced: norms become one operator, with the sum they read and with the encoding of what they hand to low-bit products;
q/k/v and gate/up one product each; head norms, rotation and the write into the pages one operator; the whole calls its
layers and nothing else. Such an operator is one kernel (`kernels/pointwise.py`) or, as on a CPU, a few of torch's
(`pointwise.py`). With kernels, experts with few rows each run products of our own. Whatever else a model has runs as
transformers wrote it. The self-check holds the result against plain transformers.

One product of several weights needs them to lie side by side: `lay_together` moves them there once. Each is a view of
the common memory from then on, so that copies into it, and updates in place, reach the product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lockstep.models import kernels, pointwise
from lockstep.models.arguments import refuse_unsupported
from lockstep.models.few_rows import linear_function
from lockstep.models.head import is_exact
from lockstep.models.kv import Pages, kv_shape
from lockstep.models.paged import PagedStep, attend
from lockstep.quant.encoded import Encoded
from lockstep.quant.inputs import InputCode, Rows
from lockstep.quant.layers import is_fused_experts
from lockstep.quant.modules import LowBitLinear, use_experts_function

FAMILIES = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe")
ATTENTION = frozenset(f"{family}Attention" for family in FAMILIES)  # project, norm heads or not, rotate halves, attend
WINDOW_OF_CONFIG = frozenset({"MistralAttention", "MixtralAttention"})  # the same in all layers
MLP = frozenset(f"{family}MLP" for family in FAMILIES)
MODEL = frozenset(f"{family}Model" for family in FAMILIES)  # layers of (norm, attend, add, norm, compute, add), norm
NORM = frozenset(f"{family}RMSNorm" for family in FAMILIES)
ROTARY = frozenset(f"{family}RotaryEmbedding" for family in FAMILIES)  # cos and sin of positions times frequencies
FIXED = frozenset({"default", "linear", "llama3", "yarn"})  # kinds of frequencies that no request changes
CAUSAL_LM = frozenset(f"{family}ForCausalLM" for family in FAMILIES)  # embed, MODEL's layers and norm, head
SILU = frozenset({"SiLU", "SiLUActivation"})
EXPERTS = "lockstep_engine"
TOGETHER = QKV, GATE_UP = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

Product = Callable[[Any], Tensor]  # of Rows: encoded ones where `input_code` says so, else tensors


class Operators(Protocol):
    """What stands between products: the functions of `pointwise.py` and `kernels/pointwise.py`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, code: InputCode | None = None) -> Rows: ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, code: InputCode | None = None
    ) -> tuple[Tensor, Rows]: ...

    def gated_silu(self, gate_up: Tensor, code: InputCode | None) -> Rows: ...

    def rotate_and_store(
        self,
        qkv_N: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        rotary: tuple[Tensor, Tensor],
        slots_N: Tensor,
        cache: Pages,
    ) -> Tensor: ...


def fuse(view: PreTrainedModel) -> None:
    """Replaces the forwards of a view that calls the paged attention."""
    operators = _operators(view)
    for part in view.modules():
        kind = type(part).__name__
        if kind in ATTENTION:
            part.forward = partial(_attention, part, operators, product(part, QKV))
        elif kind in MLP and type(part.act_fn).__name__ in SILU:
            part.forward = partial(_mlp, part, operators, product(part, GATE_UP), input_code(part, ("down_proj",)))
        elif kind in NORM:
            part.forward = partial(_norm, part, operators)
        elif kind in MODEL:
            for layer in part.get_submodule("layers").children():
                _fuse_layer(layer, operators)
        elif kind in CAUSAL_LM:
            part.forward = partial(_causal_lm, part)
        elif operators is not pointwise and is_fused_experts(part):
            use_experts_function(part, EXPERTS)
        elif operators is not pointwise and kind in ROTARY and part.rope_type in FIXED:
            part.forward = partial(_rotary, part)


def _operators(view: PreTrainedModel) -> Operators:
    """Kernels want heads whose size is a power of two, the same for keys and values."""
    _, key_size, value_size = kv_shape(view.config.get_text_config())
    if not kernels.available(view.device) or key_size != value_size or key_size & (key_size - 1):
        return pointwise
    from lockstep.models.kernels import pointwise as compiled

    return compiled.Exact() if is_exact(view) else compiled


def _fuse_layer(layer: Any, operators: Operators) -> None:
    codes = input_code(layer.self_attn, QKV), input_code(layer.mlp, GATE_UP)
    layer.forward = partial(_layer, layer, operators, *codes)


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
        if p.data_ptr() != expected or p.untyped_storage().data_ptr() != storage or p.stride() != first.stride():
            return None
        expected += len(p) * p.stride(0) * p.element_size()
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
                return partial(linear_function(weight), weight=weight, bias=bias)
        if all(type(linear) is LowBitLinear for linear in linears):
            encoded, format = joined_low_bit(linears), linears[0].weight.format
            if encoded is not None:
                return partial(format.linear, weight=encoded, bias=bias)
    return lambda x: torch.cat([linear(x) for linear in linears], -1)


def joined_low_bit(linears: Sequence[LowBitLinear]) -> Encoded | None:
    """The same for weights in low bits, which encode their common input once."""
    weights = [linear.weight.encoded for linear in linears]
    codes, scales = joined([weight.codes for weight in weights]), joined([weight.scales for weight in weights])
    if codes is None or scales is None:
        return None
    return Encoded(codes, scales, (len(codes), weights[0].shape[1]))


def input_code(part: nn.Module, names: Sequence[str]) -> InputCode | None:
    """What linear layers that share their input all want it encoded in; None: as it is."""
    linears: list[Any] = [getattr(part, name, None) for name in names]
    codes = {linear.weight.format.input_code if type(linear) is LowBitLinear else None for linear in linears}
    return codes.pop() if len(codes) == 1 else None


@dataclass(frozen=True, slots=True)
class Sum:
    """What a layer hands on. The norm that reads it, the next layer's or the model's, adds in its own kernel.

    A model of ours has nothing else between its layers; and nobody could take this for a tensor unnoticed.
    """

    residual: Tensor
    computed: Tensor


@dataclass(frozen=True, slots=True)
class Output:
    """What the engine reads of a model's: transformers' own takes as long to make as a product of a few rows."""

    logits: Tensor


def _causal_lm(
    self: Any, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor | int = 0, **arguments: Any
) -> Output:
    """Without the masks, caches and recorded outputs that nobody asks for here; attention refuses who does."""
    model = self.model
    hidden = model.embed_tokens(input_ids)
    rotary = model.rotary_emb(hidden, position_ids)
    for layer in model.layers:
        hidden = layer(hidden, position_embeddings=rotary, **arguments)
    kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    return Output(self.lm_head(model.norm(hidden)[:, kept]))


def _layer(
    self: Any,
    operators: Operators,
    attention_code: InputCode | None,
    mlp_code: InputCode | None,
    hidden_states: Tensor | Sum,
    **arguments: Any,
) -> Sum:
    residual, normed = _add_and_norm(self.input_layernorm, operators, hidden_states, attention_code)
    attended, _ = self.self_attn(hidden_states=normed, **arguments)
    residual, normed = _add_and_norm(self.post_attention_layernorm, operators, Sum(residual, attended), mlp_code)
    return Sum(residual, self.mlp(normed))


def _add_and_norm(
    norm: Any, operators: Operators, x: Tensor | Sum, code: InputCode | None = None
) -> tuple[Tensor, Rows]:
    """(the sum, its norm)."""
    if isinstance(x, Sum):
        return operators.add_rms_norm(x.computed, x.residual, norm.weight, norm.variance_epsilon, code)
    return x, operators.rms_norm(x, norm.weight, norm.variance_epsilon, code)


def _attention(
    self: Any,
    operators: Operators,
    qkv: Product,
    hidden_states: Rows,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    *,
    lockstep: PagedStep,
    **extra: Any,
) -> tuple[Tensor, None]:
    refuse_unsupported(self, attention_mask, 0.0, None, extra)
    norms = (self.q_norm.weight, self.k_norm.weight) if hasattr(self, "q_norm") else None
    eps = self.q_norm.variance_epsilon if norms else 0.0
    cache = lockstep.cache.layer(self.layer_idx)
    query = operators.rotate_and_store(qkv(hidden_states)[0], norms, eps, position_embeddings, lockstep.slots, cache)
    out = attend(query, self.layer_idx, lockstep, self.scaling, window(self))
    return self.o_proj(out.flatten(1)[None]), None


def window(attention: Any) -> int | None:
    """What its class hands to the attention function: the model's window, the layer's own, or none."""
    owner = attention.config if type(attention).__name__ in WINDOW_OF_CONFIG else attention
    return getattr(owner, "sliding_window", None)


def _mlp(self: Any, operators: Operators, gate_up: Product, down_code: InputCode | None, x: Rows) -> Tensor:
    return self.down_proj(operators.gated_silu(gate_up(x), down_code))


def _rotary(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    from lockstep.models.kernels.pointwise import rotary

    return rotary(self.inv_freq, self.attention_scaling, position_ids, x.dtype)


def _experts(self: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Few rows for each expert: our products, which copy no row. Many, as in prefill: the library's, on sorted rows."""
    from lockstep.models.kernels import experts

    num_experts, top_k = len(self.gate_up_proj), top_k_index.shape[1]
    order, offsets = experts.group(top_k_index, num_experts)
    if top_k_index.numel() > experts.MOST_ROWS * num_experts and hidden.dtype == torch.bfloat16:
        up = F.grouped_mm(hidden[order // top_k], self.gate_up_proj.mT, offs=offsets[1:])
        down = F.grouped_mm(_gate(self, up), self.down_proj.mT, offs=offsets[1:])
        return experts.combine(down, top_k_weights, order)
    up = experts.product(hidden, self.gate_up_proj, order, offsets, top_k, gather=True)
    down = experts.product(_gate(self, up), self.down_proj, order, offsets, top_k, gather=False)
    return experts.combine(down, top_k_weights)


def _gate(self: Any, up: Tensor) -> Tensor:
    from lockstep.models.kernels.pointwise import gated_silu

    plain = type(self.act_fn).__name__ in SILU and self._apply_gate.__name__ == "_default_apply_gate"
    return gated_silu(up) if plain else self._apply_gate(up)


def _norm(self: Any, operators: Operators, x: Tensor | Sum) -> Rows:
    return _add_and_norm(self, operators, x)[1]


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
