"""What `lockstep bench rollout` asks of every engine: models by shape, prompts and lengths, and the memory limit."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from lockstep.config import ConfigError
from lockstep.models.loading import quietly
from lockstep.models.tiny import byte_tokenizer

BYTES_PER_S = 4.24e12  # an H200 reads at most, measured


@dataclass(frozen=True, slots=True)
class Shape:
    """A model by its dimensions, with random weights."""

    name: str
    options: dict[str, Any]
    experts: bool = False

    def config(self, context: int) -> PreTrainedConfig:
        kind = Qwen3MoeConfig if self.experts else Qwen3Config
        return kind(max_position_embeddings=context, eos_token_id=None, bos_token_id=None, **self.options)

    def cut(self, layers: int | None) -> Shape:
        """With fewer layers, if told how many."""
        if layers and layers > self.options["num_hidden_layers"]:
            raise ConfigError(f"{layers} layers: {self.name} has {self.options['num_hidden_layers']}")
        return replace(self, options=self.options | {"num_hidden_layers": layers}) if layers else self

    def module(self, context: int, device: torch.device, seed: int = 0) -> PreTrainedModel:
        torch.manual_seed(seed)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with device:
            return AutoModelForCausalLM.from_config(self.config(context), dtype=dtype).eval()

    def save(self, folder: Path, context: int, device: torch.device) -> None:
        """A checkpoint any engine can load."""
        with quietly():
            self.module(context, device).save_pretrained(folder)
            byte_tokenizer().save_pretrained(folder)


ROTARY = {"rope_type": "default", "rope_theta": 1e6}
QWEN3 = {"vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8, "rope_parameters": ROTARY}
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
                       "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}),
        Shape("0.6b", QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                               "num_attention_heads": 16, "tie_word_embeddings": True}),
        Shape("8b", QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                             "num_attention_heads": 32, "tie_word_embeddings": False}),
        Shape("30b-a3b", QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
                                  "num_attention_heads": 32, "num_key_value_heads": 4, "tie_word_embeddings": False,
                                  "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
                                  "norm_topk_prob": True}, experts=True),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Workload:
    """`prompts` different prompts of `length` tokens, `samples` answers to each, of at most `answer` tokens."""

    name: str
    prompts: int
    samples: int
    length: int
    answer: int
    skewed: bool = False  # answers end at random lengths, most of them early, as they do in training

    @property
    def context(self) -> int:
        return self.length + self.answer + 1

    def requests(self, vocab: int) -> list[tuple[list[int], int]]:
        """(prompt, tokens to draw) of each answer, the same for every engine."""
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(0, vocab, (self.prompts, self.length), generator=generator).tolist()
        size = self.prompts * self.samples
        share = torch.rand(size, generator=generator).pow(2.0) if self.skewed else torch.ones(size)
        lengths = (share * self.answer).ceil().clamp(min=min(16, self.answer)).int().tolist()
        return [(prompts[i // self.samples], n) for i, n in enumerate(lengths)]

    def limit_seconds(self, config: PreTrainedConfig, weight_bytes: int, vocab: int) -> float:
        """Of decoding: the weights and every live key and value read once a step, everyone from the first step on. A
        prompt's are live, once for all of its answers, until the longest of these ends."""
        text: Any = config.get_text_config()
        token_bytes = 2 * 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim
        lengths = torch.tensor([n for _, n in self.requests(vocab)]).view(self.prompts, self.samples)
        read = weight_bytes * int(lengths.max())
        read += token_bytes * int(self.length * lengths.amax(1).sum() + (lengths * (lengths + 1) // 2).sum())
        return read / BYTES_PER_S


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("256x128+256", 256, 1, 128, 256),
        Workload("64x8x512+2048", 64, 8, 512, 2048, skewed=True),
        Workload("32x1024+1024", 32, 1, 1024, 1024),
        Workload("8x4x16+32", 8, 4, 16, 32, skewed=True),
        Workload("16x32+64", 16, 1, 32, 64),
    )
}


def checkpoint(
    shape: Shape, layers: int | None, context: int, device: torch.device
) -> tempfile.TemporaryDirectory[str]:
    """In memory where the system has such a folder: it is written and read once per engine."""
    root = "/dev/shm" if os.path.isdir("/dev/shm") else None
    folder = tempfile.TemporaryDirectory(prefix="lockstep-bench-", dir=root)
    shape.cut(layers).save(Path(folder.name), context, device)
    return folder


def weight_bytes(folder: Path) -> int:
    """Of a checkpoint, without an embedding that only looks rows up."""
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    embedding = 0 if config.get("tie_word_embeddings") else config["vocab_size"] * config["hidden_size"] * 2
    return total - embedding


@torch.inference_mode()
def rescore(module: PreTrainedModel, prompt: list[int], tokens: list[int]) -> list[float]:
    """What plain transformers, over the whole sequence at once, gives to an answer."""
    ids = torch.tensor([[*prompt, *tokens]], device=module.device)
    logits = module(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
