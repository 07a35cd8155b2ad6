"""Small mixtures of experts of several families, and what their routers choose by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from engine_support import sharpen
from lockstep.models.routing import Routers, find_routers, install_routing
from lockstep.models.twins import twin

SIZES: dict[str, Any] = {
    "vocab_size": 261,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 260,
    "pad_token_id": 256,
}
LATENT: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}


def qwen3(**changes: Any) -> PreTrainedModel:
    """Softmax, then top-k, normalised; a dense layer between two with experts."""
    settings: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    settings |= {"moe_intermediate_size": 16, "mlp_only_layers": [1], "head_dim": 8}
    return sharpen(Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | settings | changes)))


def mixtral() -> PreTrainedModel:
    return sharpen(MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=6, num_experts_per_tok=2)))


def qwen2() -> PreTrainedModel:
    """Not normalised, with a shared expert."""
    sizes = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    return sharpen(Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES, **sizes, num_experts=8, num_experts_per_tok=3)))


def olmoe() -> PreTrainedModel:
    return sharpen(OlmoeForCausalLM(OlmoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2)))


def deepseek_v3() -> PreTrainedModel:
    """Sigmoid and a bias, two groups of which one is allowed, a shared expert, a dense layer first."""
    module = sharpen(DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, **LATENT, n_group=2, topk_group=1)), std=0.3)
    for name, buffer in module.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)))
    return module


def deepseek_v2(**changes: Any) -> PreTrainedModel:
    config = DeepseekV2Config(**SIZES, **LATENT, **{"topk_method": "greedy", **changes})
    return sharpen(DeepseekV2ForCausalLM(config), std=0.3)


def gpt_oss() -> PreTrainedModel:
    """Top-k, then softmax. Its attention has sinks, which Lockstep refuses: only its routers are looked at."""
    return sharpen(GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2, head_dim=8)))


def many_experts() -> PreTrainedModel:
    """More than a byte can count."""
    return qwen3(num_experts=512, num_experts_per_tok=4, moe_intermediate_size=8)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": qwen3,
    "mixtral": mixtral,
    "qwen2": qwen2,
    "olmoe": olmoe,
    "deepseek_v3": deepseek_v3,
    "deepseek_v2": deepseek_v2,
    "512 experts": many_experts,
}


@dataclass
class Noting:
    """A forward argument: the routers choose, and their choice is noted; or they are told."""

    told: dict[int, Tensor] = field(default_factory=dict)
    noted: dict[int, Tensor] = field(default_factory=dict)
    decides: bool = True

    @property
    def routing(self) -> Noting:
        return self

    def choose(self, number: int, live: Tensor, scores: Tensor) -> Tensor:
        self.noted[number] = live
        return self.told.get(number, live)

    def note(self, number: int, ids: Tensor) -> None:
        self.noted[number] = ids


def obeying(module: PreTrainedModel) -> tuple[PreTrainedModel, Routers]:
    """A view with the model's own attention whose routers obey."""
    routers = find_routers(module)
    assert routers is not None
    view = twin(module, module.config._attn_implementation or "eager", share=True)
    install_routing(view, routers)
    return view, routers


@torch.inference_mode()
def own_routes(view: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """[T, layers, k]: what the routers choose in one plain forward over the whole sequence."""
    noting = Noting()
    view(input_ids=torch.tensor([list(tokens)]), use_cache=False, lockstep=noting)
    return torch.stack([noting.noted[n] for n in range(len(noting.noted))], 1)


def sets(ids: Tensor) -> Tensor:
    """Comparable: a router need not list its experts in any order."""
    return ids.long().sort(-1).values
