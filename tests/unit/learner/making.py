"""Tiny learners and judged groups for tests."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from lockstep.algorithms.config import AlgorithmConfig
from lockstep.config import Plugin
from lockstep.learner.config import LearnerConfig
from lockstep.learner.parallel import full_weights
from lockstep.learner.step import LearnerCore
from lockstep.learner.update_scale import UpdateScale
from lockstep.models import loading, varlen
from lockstep.models.head import install_head
from lockstep.models.loading import Loaded
from lockstep.models.lowbit import LowBitWeights
from lockstep.models.routing import Routers, install_routing
from lockstep.models.tiny import byte_tokenizer
from lockstep.types import Group, Routes, Sample, StopReason, Trajectory, Verdict

VOCAB = 53
# A large eps: Adam's first step is otherwise the gradient's sign, which blows rounding up to a whole step.
LEARNER = {"learning_rate": 1e-2, "weight_decay": 0.1, "optimiser": {"name": "adamw", "eps": 1e-3}}


EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTERS = Routers(
    layers=("model.layers.0", "model.layers.1"),
    modules=("model.layers.0.mlp.gate", "model.layers.1.mlp.gate"),
    num_experts=4,
    top_k=2,
)


def make_module(with_value: bool = False, tied: bool = True, seed: int = 0, experts: bool = False) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": tied,
        "attn_implementation": varlen.NAME,
    }
    module = (
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes | EXPERTS)) if experts else Qwen3ForCausalLM(Qwen3Config(**sizes))
    )
    install_head(module, with_value)
    return module


def make_checkpoint(folder: Path, seed: int = 0, experts: bool = False) -> str:
    """What `make_core` with the same seed starts from, as a Hugging Face checkpoint."""
    module = make_module(seed=seed, experts=experts)
    plain = type(module)(copy.deepcopy(module.config))  # a head is no part of a checkpoint
    loading.save(folder, Loaded.of(plain, byte_tokenizer()), full_weights(module, torch.float32))
    return str(folder)


def make_core(
    algorithm: dict[str, Any],
    learner: dict[str, Any] | None = None,
    seed: int = 0,
    experts: bool = False,
    precision: str | None = None,
    obeying: bool = False,
) -> LearnerCore:
    """With a `precision` it publishes low-bit weights, and its own forward runs them.

    `obeying`: the routers of its experts replay what a group brings along.
    """
    settings = AlgorithmConfig.model_validate(algorithm)
    config = LearnerConfig.model_validate(LEARNER | (learner or {}))
    module = make_module(settings.needs_values, seed=seed, experts=experts)
    update_scale, low_bit = _update_scale(module, config), _low_bit(module, config, precision)
    routers = ROUTERS if obeying else None
    if routers is not None:
        install_routing(module, routers)
    return LearnerCore(
        module, settings, config, num_updates=100, update_scale=update_scale, low_bit=low_bit, routers=routers
    )


def _low_bit(module: PreTrainedModel, config: LearnerConfig, precision: str | None) -> LowBitWeights | None:
    if precision is None:
        return None
    plugin = Plugin(package="lockstep.quant.formats", name=precision)
    made = LowBitWeights(module, plugin, updates_per_version=config.num_updates)
    made.run_by_learner(module)
    return made


def _update_scale(module: PreTrainedModel, config: LearnerConfig) -> UpdateScale | None:
    """Found in a model without our attention and head, as it is when a run loads one."""
    if config.update_scale == 1:
        return None
    plain = type(module)(copy.deepcopy(module.config)).eval()
    plain.set_attn_implementation("sdpa")
    return UpdateScale.of(plain, config)


def make_trajectory(uid: str, reward: float | None, generator: torch.Generator, **changes: Any) -> Trajectory:
    prompt = int(torch.randint(3, 9, (1,), generator=generator))
    sampled = int(torch.randint(1, 15, (1,), generator=generator))
    mask = torch.arange(prompt + sampled) >= prompt
    logp = torch.where(mask, -4.0 + torch.rand(len(mask), generator=generator), 0.0)
    fields: dict[str, Any] = {
        "uid": uid,
        "tokens": torch.randint(VOCAB, (len(mask),), generator=generator),
        "mask": mask,
        "logp_behav": logp,
        "versions": torch.where(mask, 0, -1).int(),
        "temperature": 1.0,
        "stop_reason": StopReason.EOS,
        "verdict": Verdict(value=reward),
        "text": "",
    }
    return Trajectory(**fields | changes)


def make_group(index: int, rewards: Sequence[float | None], seed: int = 0) -> Group:
    generator = torch.Generator().manual_seed(1000 * seed + index)
    answers = (make_trajectory(f"{index}/{i}", reward, generator) for i, reward in enumerate(rewards))
    return Group(index=index, sample=Sample(uid=str(index), messages=()), version=0, trajectories=tuple(answers))


def make_groups(num: int = 4, seed: int = 0) -> list[Group]:
    return [make_group(i, (1.0, 0.0, 0.5, 0.0), seed) for i in range(num)]


def routed(group: Group, seed: int = 0) -> Group:
    """The same with experts drawn at random for every token that is forwarded."""
    generator = torch.Generator().manual_seed(seed)

    def routes(trajectory: Trajectory) -> Routes:
        rows = len(trajectory.tokens) - 1
        ids = torch.rand(rows, ROUTERS.num_layers, ROUTERS.num_experts, generator=generator).argsort(-1)
        return Routes(ids[..., : ROUTERS.top_k].to(ROUTERS.dtype), torch.zeros(rows, dtype=torch.int32))

    return replace(group, trajectories=tuple(replace(t, routes=routes(t)) for t in group.trajectories))


def run_step(core: LearnerCore, groups: Sequence[Group], version: int = 0, skip: bool = False) -> dict[str, float]:
    core.begin(version)
    for group in groups:
        core.accumulate([group])
    core.measure()
    return core.finish(skip)
