"""Two views of one model, and the check at load that they compute what transformers computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)
from transformers.models.gemma2 import Gemma2Config, Gemma2ForCausalLM
from transformers.models.gpt_oss import GptOssConfig, GptOssForCausalLM

from engine_support import full_logp, prompt, small
from lockstep.config import ConfigError
from lockstep.models import paged, selfcheck
from lockstep.models.routing import find_routers
from lockstep.models.selfcheck import self_check
from lockstep.models.twins import twin

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def test_a_sharing_twin_follows_the_weights_a_copy_does_not() -> None:
    module = small()
    module.register_buffer("bias", torch.zeros(2))  # like a router's
    shared, copied = twin(module, paged.NAME, share=True), twin(module, paged.NAME, share=False)
    with torch.no_grad():
        module.model.norm.weight.fill_(5.0)
        module.get_buffer("bias").fill_(5.0)
    assert (shared.model.norm.weight == 5.0).all()
    assert (shared.get_buffer("bias") == 5.0).all()
    assert not (copied.model.norm.weight == 5.0).any()
    assert not (copied.get_buffer("bias") == 5.0).any()


@pytest.mark.parametrize("share", [True, False])
def test_a_twin_has_its_own_config_keeps_ties_and_takes_no_gradient(dense: PreTrainedModel, share: bool) -> None:
    before, tokens = full_logp(dense, prompt(9, seed=1)), prompt(9, seed=1)
    view = twin(dense, paged.NAME, share=share)
    assert view.lm_head.weight is view.model.embed_tokens.weight
    assert not any(p.requires_grad for p in view.parameters())
    assert all(p.requires_grad for p in dense.parameters())
    assert view.config._attn_implementation == paged.NAME
    assert dense.config._attn_implementation != paged.NAME
    assert torch.equal(full_logp(dense, tokens), before)


def test_self_check_passes_and_leaves_the_model_as_it_was(dense: PreTrainedModel, mixture: PreTrainedModel) -> None:
    for module in (dense, mixture):
        before = full_logp(module, prompt(20, seed=1))
        self_check(module)
        assert torch.equal(full_logp(module, prompt(20, seed=1)), before)


def test_experts_that_rounding_chooses_are_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """All experts score the same, but for less than our attention differs by from plain transformers."""
    module = small(experts=4)
    routers = find_routers(module)
    assert routers is not None
    torch.manual_seed(0)
    for name in routers.modules:
        weight = module.get_submodule(name).weight
        with torch.no_grad():
            weight.copy_(weight[:1] * (1 + 1e-7 * torch.randn(len(weight), 1)))
    self_check(module)
    monkeypatch.setattr(selfcheck, "find_routers", lambda module: None)
    with pytest.raises(ConfigError, match=r"(packed|paged) log-probs differ from plain transformers' by"):
        self_check(module)


def gpt_oss() -> PreTrainedModel:
    return GptOssForCausalLM(GptOssConfig(**SHAPE, num_local_experts=2, num_experts_per_tok=1))


def dynamic_rope() -> PreTrainedModel:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    return LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=rope))


def softcapped() -> PreTrainedModel:
    return Gemma2ForCausalLM(Gemma2Config(**SHAPE, attn_logit_softcapping=50.0))


def masked_window() -> PreTrainedModel:
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**SHAPE, **window, num_experts=2, num_experts_per_tok=1))


def bloom() -> PreTrainedModel:
    return BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (gpt_oss, "GptOssForCausalLM cannot be used: .*s_aux"),
        (softcapped, "Gemma2ForCausalLM cannot be used: .*softcap"),
        (dynamic_rope, "LlamaForCausalLM cannot be used: its rotary table .* depends on the longest request"),
        (masked_window, "Qwen2MoeForCausalLM cannot be used: its sliding window is in a mask"),
        (bloom, "BloomForCausalLM cannot be used: its attention cannot be replaced"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(build, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        self_check(build().eval())
    assert "\n" not in str(caught.value)


def test_a_model_whose_arithmetic_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason: here our attention scales its scores a little too much."""
    attend = paged._attend

    def wrong(*args):
        return attend(*args[:-1], args[-1] * 1.05)

    monkeypatch.setattr(paged, "_attend", wrong)
    with pytest.raises(ConfigError, match="paged log-probs differ from plain transformers' by"):
        self_check(small())


def test_what_rounding_does_is_held_against_the_spread_of_logits() -> None:
    """In bfloat16 those of a trained model, of 30 and more, are rounded to steps of an eighth and more."""
    torch.manual_seed(0)
    logits = 8 * torch.randn(5, 1000)
    distance, tolerance = selfcheck._distance, selfcheck.TOLERANCE[torch.bfloat16]
    assert (logits.log_softmax(-1) - logits.bfloat16().float().log_softmax(-1)).abs().max() > 0.05
    for scale in (0.01, 1.0):
        assert distance(scale * logits, (scale * logits).bfloat16()) < tolerance / 10
    assert distance(logits, logits + 3) < 1e-5  # the same probabilities
    assert distance(logits, 1.1 * logits) > tolerance


@pytest.mark.parametrize("masked", [0, 1, 900])
def test_a_single_wrong_logit_is_seen_among_whatever_others(masked: int) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(5, 1000)
    logits[:, :masked] = torch.finfo(torch.bfloat16).min  # as some models rule tokens out
    wrong = logits.clone()
    wrong[2, -1] += 2
    assert selfcheck._distance(logits, logits) == 0
    assert selfcheck._distance(logits, wrong) > selfcheck.TOLERANCE[torch.bfloat16]
    wrong[2, 0 if masked else 5] = 5.0 if masked else -torch.inf  # masked by one side alone
    assert selfcheck._distance(logits, wrong) == torch.inf


def test_a_model_that_gives_nan_is_refused() -> None:
    module = small()
    with torch.no_grad():
        module.model.norm.weight.fill_(torch.nan)
    with pytest.raises(ConfigError, match="differ from plain transformers' by nan"):
        self_check(module)


def test_a_layer_that_skips_our_attention_is_noticed() -> None:
    module = small()

    class Identity(nn.Module):
        def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, None]:
            return hidden_states, None

    module.model.layers[1].self_attn = Identity()
    with pytest.raises(ConfigError, match="attention ran 1 times in 2 layers"):
        self_check(module)
