"""The embedded engine and plain transformers are the same function: same greedy tokens, same log-probs to 1e-4.

Whatever the engine does to be fast — chunked prefill, shared prefixes, preemption, batches of anything with anything —
must not show in its answers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from engine_support import ask, assert_scored, engine_core, finish, full_logp, greedy, prompt, sharpen, small
from lockstep.models.selfcheck import self_check
from lockstep.types import Request, StopReason

STORIES = Path(__file__).resolve().parents[2].parent / "shared" / "models" / "stories260K"
COMMON = {
    "vocab_size": 261,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 260,
    "pad_token_id": 256,
}


def llama() -> PreTrainedModel:
    return sharpen(LlamaForCausalLM(LlamaConfig(**COMMON)))


def gemma3() -> PreTrainedModel:
    """Five sliding layers for one full layer, scaled embeddings, norms of 1 + weight."""
    config = Gemma3TextConfig(**COMMON | {"num_hidden_layers": 6, "head_dim": 16}, sliding_window=8)
    return sharpen(Gemma3ForCausalLM(config), std=0.25)


def gpt2() -> PreTrainedModel:
    """Learned positions, no grouped queries, biases everywhere."""
    return sharpen(GPT2LMHeadModel(GPT2Config(vocab_size=261, n_positions=128, n_embd=32, n_layer=2, n_head=4)))


def deepseek() -> PreTrainedModel:
    """Latent attention (keys longer than values), a dense layer, then sigmoid routing with a shared expert."""
    config = DeepseekV3Config(
        **COMMON | {"num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    )
    return sharpen(DeepseekV3ForCausalLM(config), std=0.25)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": small,
    "qwen3_moe": lambda: small(experts=4),
    "llama": llama,
    "gemma3": gemma3,
    "gpt2": gpt2,
    "deepseek_v3": deepseek,
}


def mixed_requests(max_tokens: int = 24) -> list[Request]:
    """Short and long prompts, equal ones, and two that share their beginning."""
    shared = prompt(37, seed=9)
    prompts = [prompt(n, seed=n) for n in (1, 5, 16, 17, 50)] + [shared, shared, shared[:33] + prompt(6, seed=3)]
    return [ask(f"r{i}", tokens, max_tokens) for i, tokens in enumerate(prompts)]


@pytest.fixture(scope="module", params=MODELS)
def module(request: pytest.FixtureRequest) -> PreTrainedModel:
    return MODELS[request.param]()


def test_distributions_are_not_flat(module: PreTrainedModel) -> None:
    """Otherwise the comparisons below would say little."""
    logp = full_logp(module, prompt(60, seed=1))
    entropy = -(logp.exp() * logp).sum(-1).mean()
    assert entropy < 0.9 * torch.tensor(261.0).log()


def test_greedy_equals_generate_and_log_probs_equal_a_full_forward(module: PreTrainedModel) -> None:
    self_check(module)
    requests = mixed_requests()
    done = finish(engine_core(module), requests)
    for request in requests:
        assert done[request.uid].tokens == greedy(module, request)
        assert done[request.uid].stop_reason is StopReason.LENGTH
    assert_scored(module, requests, done)


@pytest.mark.parametrize(
    "squeeze",
    [
        {"step_tokens": 16, "max_seqs": 3},  # prompts in chunks, next to sequences that decode
        {"pages": 9, "max_seqs": 8, "step_tokens": 16},  # pages run out: sequences are preempted and prefilled again
    ],
    ids=["chunked", "preempted"],
)
def test_no_trick_shows_in_the_answers(module: PreTrainedModel, squeeze: dict[str, int]) -> None:
    requests = mixed_requests()
    core = engine_core(module, **squeeze)
    done = finish(core, requests)
    for request in requests:  # greedy by the full forward, which the test above ties to `generate`
        whole = full_logp(module, [*request.tokens, *done[request.uid].tokens])
        assert whole[len(request.tokens) - 1 : -1].argmax(-1).tolist() == done[request.uid].tokens
    assert_scored(module, requests, done)
    assert (core.scheduler.counters.preemptions > 0) == ("pages" in squeeze)


def test_prefix_hits_give_the_same_answers(module: PreTrainedModel) -> None:
    core, requests = engine_core(module), mixed_requests()
    first = finish(core, requests)
    hits = core.scheduler.counters.prefix_hit_tokens
    again = finish(core, requests)
    assert core.scheduler.counters.prefix_hit_tokens - hits == sum((len(r.tokens) - 1) // 16 * 16 for r in requests)
    assert {uid: c.tokens for uid, c in again.items()} == {uid: c.tokens for uid, c in first.items()}
    assert_scored(module, requests, again)


def test_sampled_log_probs_are_those_of_the_temperature(dense: PreTrainedModel) -> None:
    requests = [ask(f"r{t}", prompt(9, seed=1), 20, temperature=t, seed=5) for t in (0.5, 1.0, 2.0)]
    done = finish(engine_core(dense), requests)
    for request in requests:
        tokens, t = done[request.uid].tokens, request.params.temperature
        logits = full_logp(dense, [*request.tokens, *tokens])[len(request.tokens) - 1 : -1]
        expected = (logits / t).log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(done[request.uid].logp), expected, atol=1e-4, rtol=0)


def test_a_batch_is_repeatable_bit_for_bit(module: PreTrainedModel) -> None:
    requests = [ask(f"s{i}", r.tokens, 24, temperature=1.0, seed=i) for i, r in enumerate(mixed_requests())]
    squeeze = {"pages": 9, "max_seqs": 6, "step_tokens": 16}
    assert finish(engine_core(module, **squeeze), requests) == finish(engine_core(module, **squeeze), requests)


def test_a_second_turn_continues_the_tokens_of_the_first(dense: PreTrainedModel) -> None:
    """The first turn's sampled tokens are found in the cache, and nothing differs from computing it all afresh."""
    core = engine_core(dense)
    first = ask("turn 1", prompt(21, seed=4), 30)
    answer = finish(core, [first])["turn 1"].tokens
    second = ask("turn 2", [*first.tokens, *answer, *prompt(7, seed=5)], 20)
    core.scheduler.counters.prefix_hit_tokens = 0
    done = finish(core, [second])
    assert core.scheduler.counters.prefix_hit_tokens == 48  # 21 + 30 tokens, the last not computed: three full pages
    assert done["turn 2"].tokens == greedy(dense, second)
    assert_scored(dense, [second], done)


@pytest.mark.skipif(not STORIES.is_dir(), reason="the trained model is not there")
def test_a_trained_model() -> None:
    module = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    self_check(module)
    texts = [
        "Once upon a time",
        "Lily and Tom went to the park. They",
        "One day, a big",
        "Once upon a time there was a cat",
    ]
    requests = [ask(text, tokenizer.encode(text, add_special_tokens=False), 100) for text in texts]
    core = engine_core(module, step_tokens=16, max_seqs=3)
    done = finish(core, requests)
    for request in requests:
        assert done[request.uid].tokens == greedy(module, request)
    assert_scored(module, requests, done)
