"""The chunked log-prob head against log_softmax over all logits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig

from lockstep.models import head as head_module
from lockstep.models.head import LogitTransform, LogProbHead, install_head, keep_logits

ROWS = torch.tensor([0, 2, 3, 8, 9, 10])
TARGETS = torch.tensor([5, 0, 30, 7, 7, 12])


def reference(
    hidden: Tensor, linear: nn.Linear, transform: LogitTransform, temperature: float
) -> tuple[Tensor, Tensor]:
    z = linear(hidden[0, ROWS]) * transform.scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    logp = (z / temperature).log_softmax(-1)
    return logp.gather(1, TARGETS[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk_rows", [1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(scale=0.5), LogitTransform(2.0, softcap=3.0)])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch, chunk_rows: int, temperature: float, transform: LogitTransform, bias: bool
) -> None:
    monkeypatch.setitem(head_module.CHUNK_ELEMENTS, "cpu", 0)
    monkeypatch.setattr(head_module, "MIN_ROWS", chunk_rows)
    torch.manual_seed(0)
    linear = nn.Linear(6, 31, bias=bias)
    head = LogProbHead(copy.deepcopy(linear), transform, with_value=False)
    hidden = torch.randn(1, 12, 6)
    h1, h2 = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    logp, entropy = reference(h1, linear, transform, temperature)
    with head.scoring(ROWS, TARGETS, temperature):
        out = head(h2)[0]
    torch.testing.assert_close(out, torch.stack([logp, entropy], -1).detach(), rtol=1e-5, atol=1e-5)

    slope = torch.randn(len(ROWS))
    (logp * slope).sum().backward()
    (out[:, 0] * slope).sum().backward()
    torch.testing.assert_close(h2.grad, h1.grad, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(head.parameters(), linear.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)


SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0),
        GraniteConfig(**SIZES, logits_scaling=7.0),
        CohereConfig(**SIZES, logit_scale=0.25),
    ],
    ids=lambda config: config.model_type,
)
def test_the_models_own_logit_transform_moves_into_the_head(config: object) -> None:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    ours.load_state_dict(plain.state_dict())
    head = install_head(ours)
    tokens = torch.randint(31, (1, 12))
    logits = plain(tokens).logits
    torch.testing.assert_close(ours(tokens).logits, logits)
    with head.scoring(ROWS, TARGETS, 1.0):
        logp = ours(tokens).logits[0, :, 0]
    torch.testing.assert_close(logp, logits[0, ROWS].log_softmax(-1).gather(1, TARGETS[:, None]).squeeze(1))
    assert dict(ours.named_parameters()).keys() == dict(plain.named_parameters()).keys()


def test_a_value_head_starts_at_zero_and_learns_from_the_same_hidden_states() -> None:
    head = LogProbHead(nn.Linear(6, 31, bias=False), LogitTransform(), with_value=True)
    with head.scoring(ROWS, TARGETS, 1.0):
        out = head(torch.randn(1, 12, 6))[0]
    assert (out[:, 2] == 0).all()
    out[:, 2].sum().backward()
    assert head.value is not None
    assert head.value.weight.grad is not None
    assert head.value.weight.grad.abs().max() > 0


def test_float32_logits_are_those_before_the_last_rounding() -> None:
    """Of a bfloat16 model, from its own forward as from the learner's head; gradients as of the rounded ones."""
    torch.manual_seed(0)
    rounded = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), dtype=torch.bfloat16).eval()
    with torch.no_grad():
        rounded.lm_head.weight.mul_(100)  # logits of 10 and more, which bfloat16 rounds by hundredths
    kept = copy.deepcopy(rounded)
    keep_logits(kept)
    tokens = torch.arange(12)[None]
    hidden = rounded.model(tokens).last_hidden_state
    exact = hidden.float() @ rounded.lm_head.weight.float().T
    torch.testing.assert_close(kept(tokens).logits, exact, rtol=1e-6, atol=1e-6)
    assert kept.state_dict().keys() == rounded.state_dict().keys()
    whole = copy.deepcopy(rounded).float()
    keep_logits(whole)
    assert type(whole.lm_head) is nn.Linear, "there is nothing to keep, and nothing is to become slower"

    expected = exact.log_softmax(-1)[0, ROWS].gather(1, TARGETS[:, None]).squeeze(1)
    found = {}
    for name, module in (("kept", kept), ("rounded", rounded)):
        head = install_head(module)
        with head.scoring(ROWS, TARGETS, 1.0):
            found[name] = module(tokens).logits[0, :, 0]
        found[name].sum().backward()
    torch.testing.assert_close(found["kept"], expected, rtol=1e-5, atol=1e-5)
    assert (found["rounded"] - expected).abs().mean() > 1e-3, "nothing was rounded: this tests nothing"
    for ours, theirs in zip(kept.parameters(), rounded.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.1, atol=0.1 * theirs.grad.abs().max().item())
