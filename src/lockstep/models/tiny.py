"""A model from nothing: a small Qwen3 (dense or MoE) with a byte-level tokenizer, for quick starts and tests."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field, field_validator, model_validator
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3Config
from transformers.models.qwen3 import Qwen3ForCausalLM
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

from lockstep.config import Config

SPECIALS = ("<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class TinyModel(Config):
    """Shape of a model made on the spot."""

    hidden: int = Field(default=128, ge=8, le=65536)
    """width of the residual stream"""
    layers: int = Field(default=4, ge=1, le=1024)
    """number of decoder layers"""
    heads: int = Field(default=4, ge=1, le=1024)
    """query heads; key/value heads are half as many"""
    context: int = Field(default=512, ge=16, le=2**24)
    """longest sequence, prompt and answer"""
    experts: int = Field(default=0, ge=0, le=4096)
    """experts per layer, two of them active; 0 is a dense model"""

    @field_validator("experts")
    @classmethod
    def _enough(cls, experts: int) -> int:
        if experts == 1:
            raise ValueError("two experts are active per token: use 0 (dense) or 2 and more")
        return experts

    @model_validator(mode="after")
    def _heads_fit(self) -> TinyModel:
        if self.heads % self.key_heads:
            raise ValueError(f"{self.heads} heads have {self.key_heads} for keys and values, which do not divide them")
        if self.head_size % 2:
            raise ValueError(f"hidden = {self.hidden} over {self.heads} heads is {self.head_size} each: an even number")
        return self

    @property
    def key_heads(self) -> int:
        return max(1, self.heads // 2)

    @property
    def head_size(self) -> int:
        return max(8, self.hidden // self.heads)


def tiny_model(shape: TinyModel, seed: int) -> PreTrainedModel:
    """Random weights that depend on the seed alone; the global generator is left as it was."""
    common: dict[str, Any] = {
        "vocab_size": 256 + len(SPECIALS),
        "hidden_size": shape.hidden,
        "intermediate_size": 3 * shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.context,
        "initializer_range": shape.hidden**-0.5,  # the usual 0.02 is for wide models: here it slows learning
        "tie_word_embeddings": True,
        "eos_token_id": 256 + SPECIALS.index("<|end|>"),
        "pad_token_id": 256 + SPECIALS.index("<|pad|>"),
        "bos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if shape.experts:
            moe: dict[str, Any] = {
                "num_experts": shape.experts,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": shape.hidden,
            }
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **moe, norm_topk_prob=True)).eval()
        return Qwen3ForCausalLM(Qwen3Config(**common)).eval()


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """One token per byte and one per special: nothing to train, nothing to download."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
