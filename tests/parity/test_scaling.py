"""Update-aware scaling: the function stays, and only what reads a pre-norm moves."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from lockstep.config import ConfigError, choices
from lockstep.config.plugins import load_class
from lockstep.models.scaling import find_scaling
from lockstep.quant.format import Format

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = {  # DeepSeek's attention: norms inside it, read by matrices
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
}
FORMATS = "lockstep.quant.formats"
QKV = {"self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"}
MLP = {"mlp.gate_proj.weight", "mlp.up_proj.weight"}
MIXTURE = {"mlp.gate.weight", "mlp.experts.gate_up_proj"}
SHARED = {"mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight", "mlp.shared_expert_gate.weight"}
NORMS = {"input_layernorm.weight", "post_attention_layernorm.weight"}
SANDWICH = {"input_layernorm.weight", "pre_feedforward_layernorm.weight"}

# model type, its own sizes, the matrices and norms that are scaled in its last layer
MODELS: dict[str, tuple[str, dict[str, Any], set[str], set[str]]] = {
    "qwen3": ("qwen3", {}, QKV | MLP, NORMS),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}, QKV | MLP, NORMS),
    "llama": ("llama", {}, QKV | MLP, NORMS),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}, QKV | MLP, NORMS),
    "qwen2": ("qwen2", {}, QKV | MLP, NORMS),
    "qwen3_moe": ("qwen3_moe", EXPERTS, QKV | MIXTURE, NORMS),
    "qwen2_moe": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 8}, QKV | MIXTURE | SHARED, NORMS),
    "mixtral": ("mixtral", {"num_local_experts": 4}, QKV | MIXTURE, NORMS),
    "gemma3": ("gemma3_text", {"head_dim": 4}, QKV | MLP, SANDWICH),
    "gpt2": (
        "gpt2",
        {"n_embd": 16, "n_layer": 2, "n_head": 4},
        {"attn.c_attn.weight", "mlp.c_fc.weight"},
        {"ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        LATENT,
        {
            "self_attn.q_a_proj.weight",
            "self_attn.q_b_proj.weight",
            "self_attn.kv_a_proj_with_mqa.weight",
            "self_attn.kv_b_proj.weight",
            "mlp.shared_experts.gate_proj.weight",
            "mlp.shared_experts.up_proj.weight",
        }
        | MIXTURE,
        NORMS | {"self_attn.q_a_layernorm.weight", "self_attn.kv_a_layernorm.weight"},
    ),
}


def make(kind: str, extra: dict[str, Any]) -> PreTrainedModel:
    """Random norms and biases too: fresh ones are 1 and 0, which hides mistakes."""
    module = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES | extra)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.5 if parameter.ndim == 1 else 0.0, 0.3, generator=generator)
    return module


@torch.no_grad()
def logits(module: PreTrainedModel) -> torch.Tensor:
    tokens = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(1))
    return module(input_ids=tokens, use_cache=False).logits.float()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def in_last_layer(names: Iterable[str]) -> set[str]:
    return {name.split(".1.", 1)[1] for name in names if ".1." in name}


@pytest.mark.parametrize("name", MODELS)
def test_the_function_stays_and_only_readers_of_pre_norms_move(name: str) -> None:
    kind, extra, matrices, norms = MODELS[name]
    module = make(kind, extra)
    original = copy.deepcopy(module.state_dict())
    scaling = find_scaling(module)
    assert all(torch.equal(tensor, original[n]) for n, tensor in module.state_dict().items()), "finding changes nothing"
    assert in_last_layer(scaling.matrices) == matrices
    assert in_last_layer(scaling.norms) == norms

    before, weights = logits(module), dict(module.named_parameters())
    scaling.apply(weights, 1.5)
    assert {n for n, p in weights.items() if not torch.equal(p, original[n])} == {*scaling.matrices, *scaling.norms}
    assert relative(logits(module), before) < 1e-5
    for n, parameter in weights.items():
        torch.testing.assert_close(scaling.undo(n, parameter, 1.5), original[n], rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_power_of_two_is_exact_both_ways_in_any_dtype(dtype: torch.dtype) -> None:
    module = make("qwen3_moe", EXPERTS).to(dtype)
    original, before = copy.deepcopy(module.state_dict()), logits(module)
    scaling, weights = find_scaling(module), dict(module.named_parameters())
    scaling.apply(weights, 0.25)
    assert torch.equal(logits(module), before)
    assert all(torch.equal(scaling.undo(n, parameter, 0.25), original[n]) for n, parameter in weights.items())


@pytest.mark.parametrize(
    ("kind", "extra", "reason"),
    [
        ("olmo2", {}, "Olmo2ForCausalLM: no norm in model.layers.0 is read by matrices"),  # norms after matrices only
        ("olmo", {}, "OlmoForCausalLM: no norm in model.layers.0"),  # norms without a gain
        ("llama4_text", {"num_local_experts": 4}, "Llama4ForCausalLM: its logits change"),  # scales expert inputs
    ],
)
def test_models_without_pre_norms_or_with_other_readers_are_refused_by_name(
    kind: str, extra: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        find_scaling(make(kind, extra))


def test_a_norm_that_is_also_read_outside_matrices_is_refused() -> None:
    """Post-norm blocks such as BERT's take the residual from the norm's output."""
    module = make("llama", {})
    layer = module.get_submodule("model.layers.1")
    plain = layer.forward
    layer.forward = lambda hidden, **kwargs: plain(hidden, **kwargs) + layer.get_submodule("input_layernorm")(hidden)
    with pytest.raises(ConfigError, match="LlamaForCausalLM: its logits change"):
        find_scaling(module)


@pytest.mark.parametrize("name", choices(FORMATS))
def test_a_uniform_scale_changes_no_code(name: str) -> None:
    """Scales follow the largest weight, so they take up any factor; by 1.5 a few weights are rounded over a tie.

    4-bit scales are rounded to bfloat16, which a power of two passes through and 1.5 does not.
    """
    format: Format = load_class(FORMATS, name)()
    weight = torch.randn(512, 384, generator=torch.Generator().manual_seed(0)) * 0.05
    codes = format.quantize(weight)
    assert codes.changed(format.quantize(weight / 2)) == 0
    assert codes.changed(format.quantize(weight / 1.5)) < (5e-3 if format.bits == 4 else 2e-5)
