"""On a GPU: the fused variable-length attention against the padded one, in a whole model, with gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from lockstep.data.packing import collate, example_row
from lockstep.learner.scoring import score
from lockstep.models import varlen
from lockstep.models.head import install_head
from lockstep.types import Batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for prompt_length in (40, 200, 3):
        prompt = torch.randint(997, (prompt_length,), generator=generator)
        for length in (5, 130, 64):
            tokens = torch.cat([prompt, torch.randint(997, (length,), generator=generator)])
            rows.append(replace(example_row(tokens, torch.arange(len(tokens)) >= prompt_length), alone=False))
    return collate(rows).to(torch.device("cuda"))


def run(batch: Batch, dtype: torch.dtype, window: int | None, size: int = 64) -> tuple[Tensor, Tensor]:
    """Log-probs, and the gradient of the embedding, which every layer contributes to."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=997,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=size,
        use_sliding_window=window is not None,
        sliding_window=window,
        max_window_layers=1,
        attn_implementation=varlen.NAME,
    )
    module = Qwen3ForCausalLM(config).eval().to("cuda", dtype)
    install_head(module)
    logp = score(module, batch).logp
    logp.sum().backward()
    gradient = module.get_input_embeddings().weight.grad
    assert isinstance(gradient, Tensor)
    return logp.detach(), gradient.float()


@pytest.mark.parametrize("size", [64, 96])  # by our kernel, and by flash attention
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_equals_padded(window: int | None, share: bool, dtype: torch.dtype, size: int) -> None:
    batch = make_batch()
    assert batch.shared is not None
    exact, exact_gradient = run(replace(batch, shared=None), torch.float32, window, size)
    fused, gradient = run(batch if share else replace(batch, shared=None), dtype, window, size)
    assert (fused - exact).abs().mean() < 0.02
    assert (gradient - exact_gradient).norm() < 0.05 * exact_gradient.norm()


def test_float32_takes_the_padded_path_with_shared_prompts() -> None:
    batch = make_batch()
    a, b = run(batch, torch.float32, None), run(replace(batch, shared=None), torch.float32, None)
    torch.testing.assert_close(a[0], b[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("window", [None, 16, 64])
@pytest.mark.parametrize("group", [1, 4])
def test_gradients_are_those_of_attention_in_float32(exact: bool, window: int | None, group: int) -> None:
    """Of queries, keys and values, each by itself; one sequence has a single token."""
    torch.manual_seed(0)
    lengths, scale = (70, 1, 133), 0.2
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    packed = varlen.Packed(cu_seqlens=ends, max_seqlen=max(lengths))
    given = [torch.randn(sum(lengths), heads, 64, device="cuda") for heads in (2 * group, 2, 2)]
    upstream = torch.randn_like(given[0])

    def gradients(dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.bfloat16().to(dtype).requires_grad_() for x in given]
        if dtype == torch.float32:
            out = varlen._padded(*inputs, packed, scale, window)
        else:
            out = varlen._AsTheEngine.apply(*inputs, packed, scale, window, exact)
        return [out, *torch.autograd.grad(out, inputs, upstream.to(dtype))]

    for found, expected in zip(gradients(torch.bfloat16), gradients(torch.float32), strict=True):
        by_head = (found.float() - expected).norm(dim=(0, 2)) / expected.norm(dim=(0, 2))
        assert float(by_head.max()) < 0.02
