"""All roles of a tiny low-bit training in one process, driven by hand: sample, learn, publish."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_support import sharpen
from lockstep.assembly.recipe import Recipe
from lockstep.assembly.roles import Training, load_model
from lockstep.config.loading import validate
from lockstep.config.plugins import name_of
from lockstep.learner.rows import admit
from lockstep.models.lowbit import LowBitWeights
from lockstep.models.operators import engine_operators
from lockstep.quant.format import Format
from lockstep.report.recorder import Recorders
from lockstep.types import Group

TASK = f"{Path(__file__).parent / 'integration' / 'printable.py'}:Printable"
PROMPTS = 2


def as_written(format: Format) -> dict[str, Any]:
    """The format as a recipe names it."""
    return {
        "name": name_of(type(format)),
        **{f.name: getattr(format, f.name) for f in fields(format)},  # type: ignore[arg-type]
    }


def make_recipe(precision: object, *, experts: int = 0, max_staleness: int = 0, **learner: Any) -> Recipe:
    tables = {
        "device": "cpu",
        "model": {"init": {"hidden": 32, "layers": 2, "heads": 4, "context": 64, "experts": experts}},
        "task": TASK,
        "algorithm": {"surrogate": "grpo", "truncated": "keep"},
        "train": {"steps": 10, "prompts": PROMPTS, "group_size": 4, "max_staleness": max_staleness},
        "rollout": {"max_tokens": 16, "max_seqs": 16, "precision": precision},
        "learner": {"learning_rate": 3e-3, **learner},
        "eval": {"samples": 0},
    }
    return validate(Recipe, tables, "test")


@asynccontextmanager
async def started(recipe: Recipe) -> AsyncIterator[Training]:
    """Version 0 is published. Weights are large enough that distributions are not flat."""
    loaded = load_model(recipe)
    sharpen(loaded.module)
    roles = Training(recipe, loaded, Recorders([]))
    try:
        await roles.learner.publish(0)
        await roles.engine.update_weights(0)
        yield roles
    finally:
        await roles.close()


async def take_step(roles: Training, *, approve: bool = True) -> Mapping[str, float]:
    """One training step on freshly sampled groups, and the sync after it."""
    version = roles.learner.version
    indices = range(PROMPTS * version, PROMPTS * (version + 1))
    for index in indices:
        await roles.rollout.run(index, roles.prompts(index), version)
    result = await roles.learner.step(version, _arriving(indices), lambda measured: approve)
    await roles.engine.update_weights(result.version)
    return result.metrics


async def _arriving(indices: Sequence[int]) -> AsyncIterator[int]:
    for index in indices:
        yield index


async def gaps(roles: Training) -> Tensor:
    """|engine's log-prob - learner's| of every token of fresh answers."""
    index = 1000 + roles.learner.version
    answers = await roles.answerer.answers(f"gap{index}", roles.prompts(index), 6)
    group = Group(index=index, sample=roles.prompts(index), version=roles.learner.version, trajectories=tuple(answers))
    check_routes = roles.core._check_routes
    batch, _ = roles.core.updater.score(admit(group, roles.learner.version, "keep", Counter(), check_routes).rows)
    return (batch.logp_prox - batch.logp_behav)[batch.mask].abs()


def low_bit_of(roles: Training) -> LowBitWeights:
    assert roles.low_bit is not None
    return roles.low_bit


def engine_state(roles: Training) -> dict[str, Tensor]:
    """The tensors the engine really computes with."""
    return roles.engine._core.module.state_dict()  # type: ignore[attr-defined]


def engine_formats(roles: Training) -> set[str]:
    found = engine_operators(roles.engine._core.module, torch.float32)  # type: ignore[attr-defined]
    return {operator.format for operator in found.values()}
