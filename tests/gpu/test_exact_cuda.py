"""On a GPU: with `rollout.exact` engine and learner compute the same log-probs bit for bit; without, they do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kernel_support import DEVICE, MARKS
from lockstep.assembly.recipe import Recipe
from lockstep.assembly.roles import load_model
from lockstep.config import ConfigError
from lockstep.config.loading import validate
from lockstep.models import exact as exactness
from lockstep.models.tiny import byte_tokenizer
from role_support import TASK, gaps, started, take_step

pytestmark = [*MARKS, pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")]

SHAPE = {"hidden": 256, "layers": 4, "heads": 4, "context": 512}


def recipe(
    precision: object,
    *,
    exact: bool,
    experts: int = 0,
    float32_logits: bool = False,
    path: Path | None = None,
    **rollout: Any,
) -> Recipe:
    """Answers of up to 400 tokens, so that keys are read in many blocks, by whole batches and by one."""
    model = {"path": str(path)} if path is not None else {"init": {**SHAPE, "experts": experts}}
    tables = {
        "device": "cuda",
        "model": {**model, "float32_logits": float32_logits},
        "task": TASK,
        "algorithm": {"surrogate": "grpo", "truncated": "keep"},
        "train": {"steps": 10, "prompts": 2, "group_size": 4},
        "rollout": {
            "max_tokens": 400,
            "max_seqs": 16,
            "precision": precision,
            "kv_gib": 0.5,
            "exact": exact,
            **rollout,
        },
        "eval": {"samples": 0},
    }
    return validate(Recipe, tables, "test")


COMMON: dict[str, Any] = {
    "vocab_size": 261,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 257,
    "pad_token_id": 256,
}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**COMMON)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**COMMON, sliding_window=100)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**COMMON)),
}


def largest_gap(precision: object, **options: Any) -> float:
    """Before and after an update."""

    async def measure() -> float:
        async with started(recipe(precision, **options)) as roles:
            before = await gaps(roles)
            await take_step(roles)
            return float(torch.cat([before, await gaps(roles)]).max())

    return asyncio.run(measure())


@pytest.mark.parametrize(
    "precision", ["int8_w8a8", {"name": "fp8_w8a8", "block": True}, "w4a8", {"name": "w4a8", "inputs": "fp8"}]
)
def test_the_learner_repeats_what_was_sampled(precision: object) -> None:
    assert largest_gap(precision, exact=True) == 0


def test_it_does_with_logits_that_are_not_rounded() -> None:
    assert largest_gap("int8_w8a8", exact=True, float32_logits=True) == 0


def test_it_does_where_prompts_come_in_chunks_between_steps_of_others() -> None:
    assert largest_gap("int8_w8a8", exact=True, step_tokens=16, max_seqs=3) == 0


@pytest.mark.parametrize("family", ["qwen2", "mistral", "llama"])
def test_it_does_in_other_families(family: str, tmp_path: Path) -> None:
    """With biases, windows, and neither of them nor norms of heads."""
    torch.manual_seed(0)
    model = FAMILIES[family]()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert largest_gap("int8_w8a8", exact=True, path=tmp_path) == 0


def test_without_it_rounding_differs() -> None:
    assert largest_gap("int8_w8a8", exact=False, float32_logits=True) > 1e-3


def test_a_mixture_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"exact = true needs a dense model"):
        load_model(recipe("int8_w8a8", exact=True, experts=4))


def test_a_device_on_which_rows_depend_on_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.models.kernels import output

    linear = output.linear
    monkeypatch.setattr(output, "linear", lambda x, *rest: linear(x, *rest) + 1e-6 * len(x))
    with pytest.raises(ConfigError, match="products of few rows and of many differ"):
        load_model(recipe("int8_w8a8", exact=True))
    monkeypatch.setattr(exactness, "_decode_is_prefill", lambda *given: False)
    with pytest.raises(ConfigError, match="attention of one token and of many differ"):
        load_model(recipe("int8_w8a8", exact=True))
