"""Packed equals separate equals plain transformers, and what goes wrong without our attention."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from lockstep.data.packing import Row, collate, example_row, pack
from lockstep.learner.scoring import score
from lockstep.models import varlen
from lockstep.models.head import install_head

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}
CONFIGS = {
    "qwen3": Qwen3Config(**SIZES),
    "qwen3 tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen3 sliding": Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3 moe": Qwen3MoeConfig(**SIZES | MOE),
    "llama": LlamaConfig(**SIZES, attention_bias=True),
    "deepseek: K and V of different width": DeepseekV3Config(
        **{k: v for k, v in SIZES.items() if k != "head_dim"} | MLA
    ),
}
LENGTHS = (40, 7, 25, 130, 3, 40)


def plain_and_learner(config: object) -> tuple[PreTrainedModel, PreTrainedModel]:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    learner = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=varlen.NAME).eval()
    learner.load_state_dict(plain.state_dict())
    install_head(learner)
    return plain, learner


def rows(lengths: tuple[int, ...] = LENGTHS) -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for length in lengths:
        mask = torch.rand(length, generator=generator) < 0.7
        mask[0], mask[-1] = False, True
        made.append(example_row(torch.randint(97, (length,), generator=generator), mask))
    return made


def plain_logp(module: PreTrainedModel, row: Row) -> Tensor:
    logp = module(row.tokens[None], use_cache=False).logits[0].log_softmax(-1)
    return logp[:-1].gather(1, row.tokens[1:, None]).squeeze(1)[row.mask[1:]]


def gradients(module: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_equals_separate_and_plain_transformers(name: str) -> None:
    plain, learner = plain_and_learner(CONFIGS[name])
    batch = collate(rows())
    packed = score(learner, batch).logp
    separate = torch.cat([score(learner, collate([row])).logp for row in rows()])
    expected = torch.cat([plain_logp(plain, row) for row in rows()])
    assert (packed - separate).abs().max() < 1e-5
    assert (packed[batch.mask] - expected).abs().max() < 1e-5
    assert (packed[~batch.mask] == 0).all()

    expected.sum().backward()
    packed.sum().backward()
    ours = gradients(learner)
    for parameter, gradient in gradients(plain).items():
        torch.testing.assert_close(ours[parameter], gradient, rtol=1e-4, atol=2e-4)


def test_the_default_path_leaks_between_packed_sequences() -> None:
    """The control: without our attention the same packed input gives other log-probs, without any error."""
    plain, learner = plain_and_learner(CONFIGS["qwen3"])
    batch = collate(rows((12, 12)))
    ours = score(learner, batch).logp[12:]
    leaky = plain(batch.tokens[None], position_ids=batch.positions[None]).logits[0].log_softmax(-1)
    leaky = leaky[12:-1].gather(1, batch.tokens[13:, None]).squeeze(1)
    assert (ours[1:] - leaky)[batch.mask[13:]].abs().max() > 1e-3


def test_our_attention_runs_exactly_once_per_layer() -> None:
    _, learner = plain_and_learner(CONFIGS["qwen3"])
    batch = collate(rows())
    context = varlen.Packed(cu_seqlens=batch.cu_seqlens, max_seqlen=batch.max_seqlen)
    learner(batch.tokens[None], position_ids=batch.positions[None], use_cache=False, lockstep=context)
    assert context.calls == 2


def test_what_the_attention_does_not_implement_is_refused_by_name() -> None:
    config = Gemma2Config(**SIZES, attn_logit_softcapping=50.0)
    _, learner = plain_and_learner(config)
    with pytest.raises(ValueError, match="Gemma2Attention asks for softcap"):
        score(learner, collate(rows()))
    with pytest.raises(ValueError, match="needs the forward argument `lockstep`"):
        plain_and_learner(CONFIGS["qwen3"])[1](torch.zeros(1, 4, dtype=torch.long))


def test_fused_attention_is_called_as_each_torch_release_spells_it() -> None:
    assert varlen._fused_options(frozenset({"window_size", "enable_gqa"}), 5) == {
        "window_size": (4, 0),
        "enable_gqa": False,
    }
    assert varlen._fused_options(frozenset({"is_causal"}), None) == {"is_causal": True}
    with pytest.raises(ValueError, match="sliding window"):
        varlen._fused_options(frozenset({"is_causal"}), 5)


def test_uneven_lengths_are_bucketed_so_that_one_long_sequence_does_not_pad_all() -> None:
    groups = varlen.group_lengths([1000, 10, 12, 900, 30])
    assert groups == [[0, 3], [4, 2, 1]]


def test_packing_keeps_order_and_budget() -> None:
    packed = pack(rows(), budget=60)
    assert [[len(row) for row in micro] for micro in packed] == [[40, 7], [25], [130], [3, 40]]
    batch = collate(packed[0])
    assert batch.cu_seqlens.tolist() == [0, 40, 47]
    assert batch.positions.tolist() == [*range(40), *range(7)]
    assert batch.seq.tolist() == [0] * 40 + [1] * 7


@pytest.mark.parametrize("name", ["qwen3", "qwen3 moe", "qwen3 sliding"])
def test_a_shared_prompt_runs_once_and_nothing_changes(name: str) -> None:
    """Two prompts with several answers each, one answer given twice: the same log-probs and gradients."""
    _, learner = plain_and_learner(CONFIGS[name])
    prompts, answers = rows((17, 9)), rows((5, 8, 3))
    sequences = [join(prompt, answer) for prompt in prompts for answer in (*answers, answers[-1])]
    batch = collate(sequences)
    assert batch.shared is not None
    num_run = int((batch.shared == torch.arange(len(batch.tokens))).sum())
    assert num_run == 17 + 9 + 2 * (5 + 8 + 3)
    slopes = torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(0))
    results = []
    for variant in (batch, replace(batch, shared=None)):
        learner.zero_grad()
        logp = score(learner, variant).logp
        (logp * slopes).sum().backward()
        results.append((logp.detach(), gradients(learner)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_nobody_looks_for_a_prompt_that_examples_share() -> None:
    answers = rows((5, 8, 3))
    examples = [replace(join(rows((17,))[0], answer), alone=True) for answer in answers]
    assert collate(examples).shared is None
    assert collate([replace(example, alone=False) for example in examples]).shared is not None


def join(prompt: Row, answer: Row) -> Row:
    tokens = torch.cat([prompt.tokens, answer.tokens])
    return replace(example_row(tokens, torch.arange(len(tokens)) >= len(prompt)), alone=False)
