"""Fused forwards held against the model: what they assume of it and, with torch's operators, what they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from engine_support import ask, engine_core, finish, prompt, sharpen
from lockstep.models.engine_view import engine_view
from lockstep.models.fused import ATTENTION, FAMILIES, window

WINDOW = 5
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 16}
SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
MODELS: dict[str, list[PreTrainedConfig]] = {
    "Llama": [LlamaConfig(**SHAPE)],
    "Mistral": [MistralConfig(**SHAPE, sliding_window=window) for window in (None, WINDOW)],
    "Mixtral": [MixtralConfig(**SHAPE, num_local_experts=2, sliding_window=window) for window in (None, WINDOW)],
    "Qwen2": [Qwen2Config(**SHAPE), Qwen2Config(**SHAPE, **SLIDING)],
    "Qwen2Moe": [Qwen2MoeConfig(**SHAPE, **EXPERTS, num_experts=2)],  # with a window it is refused
    "Qwen3": [Qwen3Config(**SHAPE), Qwen3Config(**SHAPE, **SLIDING)],
    "Qwen3Moe": [
        Qwen3MoeConfig(**SHAPE, **EXPERTS, num_experts=2),
        Qwen3MoeConfig(**SHAPE, **EXPERTS, **SLIDING, num_experts=2),
    ],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_has_the_window_that_its_class_hands_over(family: str) -> None:
    told: dict[int, int | None] = {}

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **arguments: Any
    ) -> tuple[Tensor, None]:
        told[module.layer_idx] = arguments.get("sliding_window")  # type: ignore[index]
        return query.transpose(1, 2), None

    AttentionInterface.register("test_windows", attend)
    for config in MODELS[family]:
        module = AutoModelForCausalLM.from_config(config, attn_implementation="test_windows").eval()
        module(input_ids=torch.arange(9)[None], use_cache=False)
        layers = [part for part in module.modules() if type(part).__name__ in ATTENTION]
        assert {layer.layer_idx: window(layer) for layer in layers} == told
        assert len(told) == SHAPE["num_hidden_layers"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_view_computes_what_transformers_modules_do(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for config in MODELS[family]:
        module = sharpen(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"))
        requests = [ask(f"{i}", prompt(7 + i, i, vocab=64), 12, temperature=1.0, seed=i) for i in range(3)]
        found = finish(engine_core(module), requests)
        with monkeypatch.context() as patch:
            patch.setattr("lockstep.models.engine_view.fuse", lambda view: None)
            expected = finish(engine_core(module), requests)
        for uid, completion in expected.items():
            assert found[uid].tokens == completion.tokens
            assert found[uid].logp == pytest.approx(completion.logp, abs=1e-5)


def test_what_nobody_implements_is_refused() -> None:
    view = engine_view(AutoModelForCausalLM.from_config(MODELS["Qwen3"][0]).eval(), share=True)
    tokens = torch.arange(4)[None]
    with pytest.raises(ValueError, match="passes an attention mask"):
        view(input_ids=tokens, position_ids=tokens, attention_mask=torch.ones(1, 4), lockstep=None)
