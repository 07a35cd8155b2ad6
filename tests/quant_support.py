"""Shared by the tests of low-bit formats: every format with every choice of its options, and tiny models by family."""

from __future__ import annotations

from dataclasses import fields
from itertools import product
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from lockstep.config.plugins import choices, load_class
from lockstep.quant import FORMATS
from lockstep.quant.encoded import Encoded
from lockstep.quant.format import Format

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPARSE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": SPARSE | {"num_experts": 4},
    "Qwen2Moe": SPARSE | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "Mixtral": {"num_local_experts": 4},
    "DeepseekV3": SPARSE | LATENT | GROUPED | {"num_key_value_heads": 4},
}


def build(name: str, **options: Any) -> PreTrainedModel:
    """A tiny causal model of the family, e.g. `Qwen3`, as transformers builds it."""
    config = getattr(transformers, f"{name}Config")(**(COMMON | MIXTURES.get(name, {}) | options))
    return AutoModelForCausalLM.from_config(config).eval()


def expert(weight: Encoded, index: int) -> Encoded:
    """One expert's weight."""
    return Encoded(weight.codes[index], weight.scales[index], weight.shape[1:])


def same_bytes(a: Encoded, b: Encoded) -> bool:
    pairs = zip(a.tensors.values(), b.tensors.values(), strict=True)
    return a.shape == b.shape and all(torch.equal(_bytes(x), _bytes(y)) for x, y in pairs)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def all_formats() -> list[Format]:
    return [variant for name in choices(FORMATS) for variant in _variants(load_class(FORMATS, name))]


def _variants(cls: Any) -> list[Format]:
    hints = get_type_hints(cls)
    values = {field.name: _values(hints[field.name]) for field in fields(cls)}
    return [cls(**dict(zip(values, chosen, strict=True))) for chosen in product(*values.values())]


def _values(hint: Any) -> tuple[Any, ...]:
    if hint is bool:
        return (False, True)
    assert get_origin(hint) is Literal, f"say here which values of {hint} to test"
    return get_args(hint)
