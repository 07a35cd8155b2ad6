"""On a GPU: with `rollout.exact` engine and learner compute the same bits; without, they do not."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from kernel_support import DEVICE, MARKS
from lockstep.assembly.recipe import Recipe
from lockstep.assembly.roles import load_model
from lockstep.config import ConfigError
from lockstep.config.loading import validate
from lockstep.models.exact import _rms_norm, refuse_inexact
from role_support import TASK, gaps, started, take_step

pytestmark = [*MARKS, pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")]
SAME = 1e-4  # nats: what is left is the order of sums in the output layer, whose logits are float32 here


def recipe(precision: object, *, exact: bool, experts: int = 0) -> Recipe:
    """Answers of up to 400 tokens, so that keys are read in many blocks, by whole batches and by one."""
    shape = {"hidden": 256, "layers": 4, "heads": 4, "context": 512, "experts": experts}
    tables = {
        "device": "cuda",
        "model": {"init": shape, "float32_logits": True},
        "task": TASK,
        "algorithm": {"surrogate": "grpo", "truncated": "keep"},
        "train": {"steps": 10, "prompts": 2, "group_size": 4},
        "rollout": {"max_tokens": 400, "max_seqs": 16, "precision": precision, "kv_gib": 0.5, "exact": exact},
        "eval": {"samples": 0},
    }
    return validate(Recipe, tables, "test")


def largest_gap(precision: object, *, exact: bool) -> float:
    """Before and after an update."""

    async def measure() -> float:
        async with started(recipe(precision, exact=exact)) as roles:
            before = await gaps(roles)
            await take_step(roles)
            return float(torch.cat([before, await gaps(roles)]).max())

    return asyncio.run(measure())


@pytest.mark.parametrize(
    "precision", ["int8_w8a8", {"name": "fp8_w8a8", "block": True}, "w4a8", {"name": "w4a8", "inputs": "fp8"}]
)
def test_the_learner_repeats_what_was_sampled(precision: object) -> None:
    assert largest_gap(precision, exact=True) < SAME


def test_without_it_rounding_differs() -> None:
    assert largest_gap("int8_w8a8", exact=False) > 10 * SAME


def test_a_mixture_is_refused() -> None:
    loaded = load_model(recipe("int8_w8a8", exact=True, experts=4))
    with pytest.raises(ConfigError, match=r"exact = true needs a dense model"):
        refuse_inexact(loaded.module)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_a_norm_is_that_of_transformers(dtype: torch.dtype) -> None:
    """Which is computed in float64 here: in 16 bits theirs is further off."""
    torch.manual_seed(0)
    norm = Qwen3RMSNorm(192).to(DEVICE, dtype)
    norm.weight.data.uniform_(0.5, 1.5)
    x, upstream = (torch.randn(3, 40, 192, device=DEVICE).to(dtype) for _ in range(2))

    def plain(self: Qwen3RMSNorm, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    def run(norm: Qwen3RMSNorm, forward: Callable[[Qwen3RMSNorm, Tensor], Tensor], dtype: torch.dtype) -> list[Tensor]:
        given = x.to(dtype).requires_grad_()
        y = forward(norm, given)
        return [y, *torch.autograd.grad(y, (given, norm.weight), upstream.to(dtype))]

    exact = run(copy.deepcopy(norm).double(), plain, torch.float64)
    for found, expected in zip(run(norm, _rms_norm, dtype), exact, strict=True):
        assert float((found.double() - expected).norm() / expected.norm()) < 1e-2
