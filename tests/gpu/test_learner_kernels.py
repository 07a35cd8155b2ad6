"""What the learner runs between its products: results and gradients against float64, and whole models against plain
transformers'.

On a GPU; or anywhere with triton installed and TRITON_INTERPRET=1, in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from kernel_support import DEVICE, DTYPES, MARKS
from lockstep.data.packing import collate, example_row
from lockstep.learner.scoring import score
from lockstep.models import varlen
from lockstep.models.head import install_head
from lockstep.models.learner_view import use_learner_view
from lockstep.models.twins import use_attention

pytestmark = MARKS
LOOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # relative, of a whole tensor
KINDS = [*DTYPES, *([torch.float16] if DEVICE.type == "cuda" else [])]
EPS = 1e-6


def differentiate(run: Callable[..., Tensor], given: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    """A function's result and gradients."""
    given = [x.detach().requires_grad_() for x in given]
    y = run(*given)
    return [y.detach(), *torch.autograd.grad(y, given, upstream.to(y.dtype))]


def assert_as_in_float64(
    run: Callable[..., Tensor], plain: Callable[..., Tensor], given: Sequence[Tensor], dtype: torch.dtype
) -> None:
    given = [x.to(DEVICE, dtype) for x in given]
    upstream = torch.randn(plain(*given).shape, device=DEVICE).to(dtype)
    found = differentiate(run, given, upstream)
    expected = differentiate(plain, [x.double() for x in given], upstream.double())
    for ours, exact in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert float((ours.double() - exact).norm()) <= LOOSE[dtype] * float(exact.norm())


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", [(3, 40, 192), (1, 2500, 64), (1, 1, 1024), (2, 0, 64)])
def test_norms(shape: tuple[int, ...], exact: bool, dtype: torch.dtype) -> None:
    from lockstep.models.kernels.differentiable import rms_norm

    torch.manual_seed(0)
    given = torch.randn(shape), torch.rand(shape[-1]) + 0.5
    assert_as_in_float64(lambda x, weight: rms_norm(x, weight, EPS, exact=exact), plain_norm, given, dtype)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("tokens", "heads", "size"), [(50, 2, 64), (7, 12, 128), (1100, 1, 16), (0, 4, 32)])
def test_heads(tokens: int, heads: int, size: int, normed: bool, dtype: torch.dtype) -> None:
    from lockstep.models.kernels.differentiable import rotated

    torch.manual_seed(0)
    angles = torch.randn(1, tokens, size // 2, device=DEVICE).repeat(1, 1, 2)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)

    def plain(x: Tensor, *weight: Tensor) -> Tensor:
        cos, sin = (table[0, :, None].to(x.dtype) for table in tables)
        x = plain_norm(x, *weight) if weight else x
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def run(x: Tensor, *weight: Tensor) -> Tensor:
        return rotated(x, weight[0] if weight else None, EPS, tables)

    given = [torch.randn(tokens, heads, size), *([torch.rand(size) + 0.5] if normed else [])]
    assert_as_in_float64(run, plain, given, dtype)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", [(1, 30, 200), (4, 1024), (0, 8)])
def test_gates(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from lockstep.models.kernels.differentiable import gated_silu

    torch.manual_seed(0)
    assert_as_in_float64(
        gated_silu, lambda gate, up: F.silu(gate) * up, (4 * torch.randn(shape), torch.randn(shape)), dtype
    )


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of the interpreter
def test_gates_far_from_zero_have_finite_gradients() -> None:
    from lockstep.models.kernels.differentiable import gated_silu

    gate = torch.tensor([-1e4, -200.0, -0.0, 200.0, 1e4], device=DEVICE)
    for found in differentiate(gated_silu, (gate, torch.ones_like(gate)), torch.ones_like(gate)):
        assert found.isfinite().all()


def test_a_tensor_that_is_not_contiguous_is_read_as_it_lies() -> None:
    from lockstep.models.kernels.differentiable import gated_silu, rms_norm

    torch.manual_seed(0)
    x, weight = torch.randn(40, 64, device=DEVICE).T, torch.rand(40, device=DEVICE)
    assert torch.equal(rms_norm(x, weight, EPS), rms_norm(x.contiguous(), weight, EPS))
    assert torch.equal(gated_silu(x, x), gated_silu(x.contiguous(), x.contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [261, 4096, 9000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_entropies_and_gradients(temperature: float, vocab: int, dtype: torch.dtype) -> None:
    from lockstep.models.kernels.output import log_prob_gradients, log_probs

    torch.manual_seed(0)
    logits = (3 * torch.randn(20, vocab, device=DEVICE)).to(dtype)
    logits[:, 7] = -torch.inf  # a token that some model rules out
    tokens, upstream = torch.arange(10, 30, device=DEVICE), torch.randn(20, device=DEVICE)
    z = (logits.double() / temperature).requires_grad_()
    expected = z.log_softmax(-1)
    logp, lse, entropy = log_probs(logits, tokens, temperature)
    chosen = expected.gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logp.double(), chosen.detach(), atol=1e-5, rtol=1e-5)
    plain_entropy = -(expected.exp() * expected.clamp(min=-1e9)).sum(-1)
    torch.testing.assert_close(entropy.double(), plain_entropy.detach(), atol=1e-5, rtol=1e-5)
    (gradient,) = torch.autograd.grad(chosen, z, upstream.double())
    found = log_prob_gradients(logits, tokens, lse, upstream, temperature, dtype)
    assert found.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(found.double(), gradient / temperature, atol=LOOSE[dtype] / 10, rtol=LOOSE[dtype])


SIZES: dict[str, Any] = {
    "vocab_size": 261,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=9)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    ),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_learns_what_plain_transformers_does(family: str, recompute: bool) -> None:
    """In float32: log-probs, and the gradient of every weight, of two sequences packed and one by one."""
    from lockstep.learner.parallel import prepare
    from lockstep.learner.ranks import Ranks

    torch.manual_seed(0)
    plain = FAMILIES[family]().to(DEVICE).eval()
    for name, parameter in plain.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    ours = copy.deepcopy(plain)
    use_learner_view(ours)
    forwards = [type(part).__name__ for part in ours.modules() if "forward" in vars(part)]
    assert sum(name.endswith(("Attention", "RMSNorm")) for name in forwards) == (11 if "qwen3" in family else 7)
    assert any(name.endswith("MLP") for name in forwards) == ("moe" not in family)
    install_head(ours)
    prepare(ours, torch.float32, recompute, Ranks.current(DEVICE))

    sequences = [torch.randint(261, (length,)) for length in (23, 11)]
    rows = [example_row(tokens, torch.arange(len(tokens)) >= 3) for tokens in sequences]
    scores = score(ours, collate(rows).to(DEVICE))
    scores.logp.sum().backward()
    logp = [
        plain(input_ids=tokens.to(DEVICE)[None], use_cache=False).logits[0, :-1].log_softmax(-1) for tokens in sequences
    ]
    expected = torch.cat(
        [F.pad(x.gather(1, t.to(DEVICE)[1:, None])[:, 0][2:], (3, 0)) for x, t in zip(logp, sequences, strict=True)]
    )
    expected.sum().backward()
    torch.testing.assert_close(scores.logp, expected, atol=1e-4, rtol=1e-4)
    theirs = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in ours.named_parameters():
        gradient = theirs[name]
        assert gradient is not None
        assert parameter.grad is not None, name
        assert float((parameter.grad - gradient).norm()) <= 1e-4 * float(gradient.norm()), name


@pytest.mark.skipif(DEVICE.type != "cuda", reason="16 bits: attention by the engine's kernel and flash's backward")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_in_16_bits_it_learns_the_same_but_for_rounding(family: str) -> None:
    torch.manual_seed(0)
    plain = FAMILIES[family]().to(DEVICE).eval()
    ours = copy.deepcopy(plain).bfloat16()
    use_learner_view(ours)
    install_head(ours)
    install_head(plain)
    use_attention(plain, varlen.NAME)
    rows = [
        example_row(tokens, torch.arange(len(tokens)) >= 3) for tokens in (torch.randint(261, (n,)) for n in (60, 33))
    ]
    batch = collate(rows).to(DEVICE)
    for module in (ours, plain):
        score(module, batch).logp.sum().backward()
    for (name, a), (_, b) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert float((a.grad.float() - b.grad).norm()) <= 0.1 * float(b.grad.norm()), name
