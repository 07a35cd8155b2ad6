"""Which layers are quantized, by the real names of transformers' classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from lockstep.quant.layers import quantized_layers

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
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
QKVO = {f"self_attn.{x}_proj.weight" for x in "qkvo"}
MLP = {f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
FUSED = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
SHARED = {f"mlp.shared_expert.{x}_proj.weight" for x in ("gate", "up", "down")}
MLA = {f"self_attn.{x}.weight" for x in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}


def build(name: str, **more: Any) -> PreTrainedModel:
    config = getattr(transformers, f"{name}Config")(**(COMMON | more))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def names(module: PreTrainedModel, layer: int = 0, keep: tuple[str, ...] = ()) -> set[str]:
    """Of one decoder layer, below it."""
    prefix = f"model.layers.{layer}."
    found = [item.name for item in quantized_layers(module, keep)]
    return {name.removeprefix(prefix) for name in found if name.startswith(prefix)}


@pytest.mark.parametrize("name", ["Qwen3", "Qwen2", "Llama", "Gemma2", "Gemma3Text", "Mistral"])
def test_dense(name: str) -> None:
    module = build(name)
    assert names(module) == QKVO | MLP
    assert len(quantized_layers(module)) == 2 * 7
    assert {item.kind for item in quantized_layers(module)} == {"linear"}


def test_mixtures_quantize_experts_and_never_the_router() -> None:
    assert names(build("Qwen3Moe", num_experts=4, **EXPERTS)) == QKVO | FUSED
    assert names(build("Mixtral", num_local_experts=4)) == QKVO | FUSED
    shared = build("Qwen2Moe", num_experts=4, shared_expert_intermediate_size=16, **EXPERTS)
    assert names(shared) == QKVO | FUSED | SHARED


def test_deepseek_v3_has_a_dense_layer_and_shared_experts() -> None:
    options = EXPERTS | LATENT | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    module = build("DeepseekV3", **options)
    assert names(module, 0) == MLA | MLP
    assert names(module, 1) == MLA | FUSED | {name.replace("expert.", "experts.") for name in SHARED}


def test_towers_are_left_alone() -> None:
    text = COMMON | {"max_position_embeddings": 64}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}
    vision |= {"deepstack_visual_indexes": [0]}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision)
    with torch.device("meta"):
        module = transformers.Qwen3VLForConditionalGeneration(config)
    found = quantized_layers(module)
    assert len(found) == 2 * 7
    assert all(item.name.startswith("model.language_model.layers.") for item in found)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("GPT2", {}, r"transformer\.h\.0\.attn\.c_attn\.weight: Conv1D holds its weight transposed"),
        ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}, "GptOssExperts is no linear layer"),
        (
            "Llama4Text",
            {"num_local_experts": 4, "intermediate_size_mlp": 32},
            "Llama4ForCausalLM: found no decoder layers",
        ),
    ],
)
def test_what_cannot_be_quantized_is_refused_by_name(name: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        quantized_layers(build(name, **options))


def test_patterns_keep_weights_in_high_precision() -> None:
    module = build("Qwen3Moe", num_experts=4, **EXPERTS)
    assert names(module, 0, ("model.layers.0.*",)) == set()
    assert names(module, 1, ("model.layers.0.*",)) == QKVO | FUSED
    assert names(module, 0, ("*.experts.*", "*.o_proj.weight")) == QKVO - {"self_attn.o_proj.weight"}
    assert len(quantized_layers(build("GPT2"), ("*.c_*",))) == 0


def test_patterns_that_make_no_sense_are_refused() -> None:
    module = build("Qwen3Moe", num_experts=4, **EXPERTS)
    with pytest.raises(ValueError, match=r"no weight .* matches '\*\.query\.\*'; one is 'model\.layers\.0"):
        quantized_layers(module, ("*.query.*",))
    with pytest.raises(ValueError, match=r"experts model\.layers\.0\.mlp\.experts are quantized whole"):
        quantized_layers(module, ("*.experts.down_proj",))
