"""What kernels of our own save the learner, and low bits and exactness cost it: steps of Qwen3-0.6B, on a GPU.

    python scripts/learner_time.py

Prints a table for docs/benchmarks/learner.md. Learners take turns; a step has the same random tokens for all of them.
Prompts are random too, so that no two answers have one in common, which a learner would compute once.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from lockstep.assembly import roles
from lockstep.assembly.recipe import Recipe
from lockstep.assembly.roles import learner_core, load_model, low_bit_weights
from lockstep.cli.rollout_workloads import SHAPES, checkpoint
from lockstep.config.loading import validate
from lockstep.learner.parallel import Ranks
from lockstep.learner.step import LearnerCore
from lockstep.models import head, varlen
from lockstep.models.twins import use_attention
from lockstep.types import Group, Sample, StopReason, Trajectory, Verdict

SHAPE, DEVICE = "0.6b", torch.device("cuda")
WORKLOADS = ((16, 8, 128, 256), (4, 8, 512, 2048))  # groups, answers in each, tokens of a prompt, of an answer
ROUNDS = 4  # of which the first does not count
FP8 = {"name": "fp8_w8a8", "block": True}
UNFUSED = "high, unfused"  # as transformers wrote it, but for attention
LEARNERS: dict[str, dict[str, Any]] = {
    "high": {},
    UNFUSED: {},
    "int8_w8a8, aligned": {"precision": "int8_w8a8"},
    "int8_w8a8, exact": {"precision": "int8_w8a8", "exact": True},
    "fp8_w8a8 block=True, aligned": {"precision": FP8},
    "fp8_w8a8 block=True, exact": {"precision": FP8, "exact": True},
}


def learner(path: str, rollout: dict[str, Any]) -> LearnerCore:
    tables = {
        "device": DEVICE.type,
        "model": {"path": path},
        "task": "arithmetic",
        "algorithm": {"surrogate": "grpo", "truncated": "keep"},
        "train": {"steps": 100},
        "rollout": rollout,
    }
    recipe = validate(Recipe, tables, "learner_time")
    loaded = load_model(recipe)
    return learner_core(recipe, loaded, Ranks.current(DEVICE), low_bit_weights(recipe, loaded), None)


@contextmanager
def unfused() -> Iterator[None]:
    """What is made, or run, meanwhile has no kernels between its products and behind its logits."""
    with (
        patch.object(roles, "use_learner_view", lambda module: use_attention(module, varlen.NAME)),
        patch.object(head, "_has_kernels", lambda transform, device: False),
    ):
        yield


def group(index: int, answers: int, prompt: int, answer: int) -> Group:
    """Rewards differ, so that there is something to learn; log-probs are about those of a model that knows nothing."""
    mask = torch.arange(prompt + answer) >= prompt
    trajectories = [
        Trajectory(
            uid=f"{index}/{number}",
            tokens=torch.randint(SHAPES[SHAPE].config(64).vocab_size, mask.shape),
            mask=mask,
            logp_behav=torch.where(mask, -12.0, 0.0),
            versions=torch.where(mask, 0, -1).int(),
            temperature=1.0,
            stop_reason=StopReason.EOS,
            verdict=Verdict(value=float(number % 2)),
            text="",
        )
        for number in range(answers)
    ]
    return Group(index=index, sample=Sample(uid=f"{index}", messages=()), version=0, trajectories=tuple(trajectories))


def seconds(core: LearnerCore, groups: list[Group]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    core.begin(0)
    core.accumulate(groups)
    core.measure()
    core.finish()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def timed(name: str, core: LearnerCore, groups: list[Group]) -> float:
    with unfused() if name == UNFUSED else nullcontext():
        return seconds(core, groups)


def main() -> None:
    torch.manual_seed(0)
    print("| groups x answers, tokens | learner | tokens/s | time, of `high` |\n|---|---|---|---|")
    with checkpoint(SHAPES[SHAPE], None, 4096, DEVICE) as path:
        cores: dict[str, LearnerCore] = {}
        for name, rollout in LEARNERS.items():
            with unfused() if name == UNFUSED else nullcontext():
                cores[name] = learner(path, rollout)
    gc.collect()
    for num, answers, prompt, answer in WORKLOADS:
        groups = [group(index, answers, prompt, answer) for index in range(num)]
        times = [[timed(name, core, groups) for name, core in cores.items()] for _ in range(ROUNDS)][1:]
        taken = [median(column) for column in zip(*times, strict=True)]
        tokens, told = num * answers * (prompt + answer), f"{num} x {answers}, {prompt:,} + {answer:,}"
        for name, spent in zip(cores, taken, strict=True):
            print(f"| {told} | `{name}` | {tokens / spent:,.0f} | {spent / taken[0]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
