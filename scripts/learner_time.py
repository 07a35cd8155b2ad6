"""What low bits, and exactness, cost the learner: whole steps of Qwen3-0.6B's shape, on a GPU.

    python scripts/learner_time.py

Prints a table for docs/benchmarks/mismatch.md. Learners take turns; a step has the same random tokens for all of them.
Prompts are random too, so that no two answers have one in common, which a learner would compute once.
"""

from __future__ import annotations

import gc
import time
from statistics import median
from typing import Any

import torch

from lockstep.assembly.recipe import Recipe
from lockstep.assembly.roles import learner_core, load_model, low_bit_weights
from lockstep.cli.rollout_workloads import SHAPES, checkpoint
from lockstep.config.loading import validate
from lockstep.learner.parallel import Ranks
from lockstep.learner.step import LearnerCore
from lockstep.types import Group, Sample, StopReason, Trajectory, Verdict

SHAPE, DEVICE = "0.6b", torch.device("cuda")
WORKLOADS = ((16, 8, 128, 256), (4, 8, 512, 2048))  # groups, answers in each, tokens of a prompt, of an answer
ROUNDS = 4  # of which the first does not count
FP8 = {"name": "fp8_w8a8", "block": True}
LEARNERS: dict[str, dict[str, Any]] = {
    "high": {},
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
        "learner": {"micro_tokens": 8192},
    }
    recipe = validate(Recipe, tables, "learner_time")
    loaded = load_model(recipe)
    return learner_core(recipe, loaded, Ranks.current(DEVICE), low_bit_weights(recipe, loaded), None)


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


def main() -> None:
    torch.manual_seed(0)
    print("| groups x answers, tokens | learner | tokens/s | time, of `high` |\n|---|---|---|---|")
    with checkpoint(SHAPES[SHAPE], None, 4096, DEVICE) as path:
        cores = {name: learner(path, rollout) for name, rollout in LEARNERS.items()}
    gc.collect()
    for num, answers, prompt, answer in WORKLOADS:
        groups = [group(index, answers, prompt, answer) for index in range(num)]
        times = [[seconds(core, groups) for core in cores.values()] for _ in range(ROUNDS)][1:]
        taken = [median(column) for column in zip(*times, strict=True)]
        tokens, told = num * answers * (prompt + answer), f"{num} x {answers}, {prompt:,} + {answer:,}"
        for name, spent in zip(cores, taken, strict=True):
            print(f"| {told} | `{name}` | {tokens / spent:,.0f} | {spent / taken[0]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
