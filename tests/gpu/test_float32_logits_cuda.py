"""On a GPU: logits that are not rounded, by the product itself and out of captured steps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from engine_support import ask, engine_core, finish, prompt, rescore, sharpen
from kernel_support import DEVICE, MARKS
from lockstep.models.head import float32_linear, keep_logits
from lockstep.models.tiny import TinyModel, tiny_model
from lockstep.rollout import burst
from lockstep.rollout.sampler import sample

pytestmark = [*MARKS, pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lead", [(), (1,), (2, 3)])
def test_the_product_is_not_rounded(dtype: torch.dtype, bias: bool, lead: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight, b = (torch.randn(*shape, device=DEVICE).to(dtype) for shape in ((*lead, 5, 64), (300, 64), (300,)))
    expected = x.double() @ weight.double().T + (b.double() if bias else 0.0)
    found = float32_linear(x, weight, b if bias else None)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_captured_steps_draw_from_logits_that_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = sharpen(tiny_model(TinyModel(hidden=64, layers=1, heads=2, context=128), seed=0), std=0.08)
    half, kinds = nn.Module.to(copy.deepcopy(module), DEVICE, torch.bfloat16), set()
    keep_logits(half)
    monkeypatch.setattr(burst, "sample", lambda logits, batch: kinds.add(logits.dtype) or sample(logits, batch))
    requests = [ask(f"{i}", prompt(20, seed=i), 40, temperature=1.0, seed=i) for i in range(6)]
    done = finish(engine_core(half, max_seqs=6), requests)
    assert kinds == {torch.float32}
    worst = max(float((torch.tensor(done[r.uid].logp) - rescore(module, r, done[r.uid])).abs().max()) for r in requests)
    assert worst < 0.3
