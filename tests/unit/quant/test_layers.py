"""Which layers are quantized, by the real names of transformers' classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from lockstep.quant.layers import quantized_layers
from quant_support import COMMON, build

QKVO = {f"self_attn.{x}_proj.weight" for x in "qkvo"}
MLP = {f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
FUSED = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
SHARED = {f"mlp.shared_expert.{x}_proj.weight" for x in ("gate", "up", "down")}
MLA = {f"self_attn.{x}.weight" for x in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}


def meta(name: str, **options: Any) -> PreTrainedModel:
    with torch.device("meta"):
        return build(name, **options)


def names(module: PreTrainedModel, layer: int = 0, keep: tuple[str, ...] = ()) -> set[str]:
    """Of one decoder layer, below it."""
    prefix = f"model.layers.{layer}."
    found = [item.name for item in quantized_layers(module, keep)]
    return {name.removeprefix(prefix) for name in found if name.startswith(prefix)}


@pytest.mark.parametrize("name", ["Qwen3", "Qwen2", "Llama", "Gemma2", "Gemma3Text", "Mistral"])
def test_dense(name: str) -> None:
    module = meta(name)
    assert names(module) == QKVO | MLP
    assert len(quantized_layers(module)) == 2 * 7
    assert {item.kind for item in quantized_layers(module)} == {"linear"}


def test_mixtures_quantize_experts_and_never_the_router() -> None:
    assert names(meta("Qwen3Moe")) == QKVO | FUSED
    assert names(meta("Mixtral")) == QKVO | FUSED
    assert names(meta("Qwen2Moe")) == QKVO | FUSED | SHARED


def test_deepseek_v3_has_a_dense_layer_and_shared_experts() -> None:
    module = meta("DeepseekV3")
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
        quantized_layers(meta(name, **options))


def test_patterns_keep_weights_in_high_precision() -> None:
    module = meta("Qwen3Moe")
    assert names(module, 0, ("model.layers.0.*",)) == set()
    assert names(module, 1, ("model.layers.0.*",)) == QKVO | FUSED
    assert names(module, 0, ("*.experts.*", "*.o_proj.weight")) == QKVO - {"self_attn.o_proj.weight"}
    assert len(quantized_layers(meta("GPT2"), ("*.c_*",))) == 0


def test_patterns_that_make_no_sense_are_refused() -> None:
    module = meta("Qwen3Moe")
    with pytest.raises(ValueError, match=r"no weight .* matches '\*\.query\.\*'; one is 'model\.layers\.0"):
        quantized_layers(module, ("*.query.*",))
    with pytest.raises(ValueError, match=r"experts model\.layers\.0\.mlp\.experts are quantized whole"):
        quantized_layers(module, ("*.experts.down_proj",))
