"""The KL estimators against float64 arithmetic without autograd, and against closed forms of a known policy."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.algorithms.config import AlgorithmConfig
from lockstep.algorithms.reference import ESTIMATORS, KL, KLConfig
from lockstep.config import ConfigError, choices
from lockstep.config.loading import validate
from lockstep.config.plugins import load_class
from lockstep.data.packing import Row, collate

BOUND = 20.0  # of a log-ratio before exp


def k1(ell: float, ref: float) -> tuple[float, float]:
    return ell - ref, 1.0


def k2(ell: float, ref: float) -> tuple[float, float]:
    return 0.5 * (ell - ref) ** 2, ell - ref


def k3(ell: float, ref: float) -> tuple[float, float]:
    x = ref - ell
    if x > BOUND:
        return math.exp(BOUND) - 1 - BOUND, 0.0
    return math.exp(x) - 1 - x, 1 - math.exp(x)


REFERENCE: dict[str, Callable[[float, float], tuple[float, float]]] = {"k1": k1, "k2": k2, "k3": k3}
LOG_PROBS = st.floats(-120, 0, width=32)


def build(name: str) -> KL:
    return load_class(ESTIMATORS, name)()


def test_every_estimator_has_a_reference() -> None:
    assert choices(ESTIMATORS) == sorted(REFERENCE)


@pytest.mark.parametrize("name", REFERENCE)
@given(pairs=st.lists(st.tuples(LOG_PROBS, LOG_PROBS), min_size=1, max_size=8))
def test_value_and_gradient(name: str, pairs: list[tuple[float, float]]) -> None:
    logp, logp_ref = (torch.tensor(column) for column in zip(*pairs, strict=True))
    logp.requires_grad_()
    estimate = build(name)(logp, logp_ref)
    estimate.sum().backward()
    assert logp.grad is not None
    for i, pair in enumerate(pairs):
        value, slope = REFERENCE[name](*pair)
        assert estimate[i].item() == pytest.approx(value, rel=2e-5, abs=1e-5)
        assert logp.grad[i].item() == pytest.approx(slope, rel=2e-5, abs=1e-5)
    assert name == "k1" or (estimate >= 0).all()


def test_k3_keeps_its_digits_near_the_reference() -> None:
    """A policy that has just begun to move: the terms that cancel are 2,000 times what is left."""
    small = torch.tensor([-1.001])
    assert build("k3")(small, torch.tensor([-1.0])).item() == pytest.approx(k3(small.item(), -1.0)[0], rel=1e-3)


def policies() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    return logits, torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)


def gradient(value: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(value, logits, retain_graph=True)[0]


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_are_the_kl_in_expectation(name: str) -> None:
    logits, ref = policies()
    logp = logits.detach().log_softmax(0)
    expected = (logp.exp() * (logp - ref)).sum()
    torch.testing.assert_close((logp.exp() * build(name)(logp, ref)).sum(), expected)


def test_what_each_teaches_as_a_loss() -> None:
    """Expected gradients over the tokens a policy draws: k1 none, k2 the reverse KL's, k3 the forward KL's."""
    logits, ref = policies()
    logp = logits.log_softmax(0)
    taught = {
        "k1": torch.zeros(7, dtype=torch.float64),
        "k2": gradient((logp.exp() * (logp - ref)).sum(), logits),
        "k3": gradient((ref.exp() * (ref - logp)).sum(), logits),
    }
    for name, expected in taught.items():
        loss = (logp.detach().exp() * build(name)(logp, ref)).sum()
        torch.testing.assert_close(gradient(loss, logits), expected)


def row(length: int, generator: torch.Generator) -> Row:
    logs = [-3 * torch.rand(length, generator=generator) for _ in range(3)]
    return Row(
        tokens=torch.zeros(length, dtype=torch.int64),
        mask=torch.arange(length) >= 2,
        logp_behav=logs[0],
        logp_prox=logs[1],
        logp_ref=logs[2],
        advantage=torch.randn(length, generator=generator),
        lag=torch.zeros(length, dtype=torch.int32),
    )


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_in_the_loss_it_is_corrected_and_reduced_with_the_surrogate(name: str) -> None:
    """token_mean of min(w, 2) · (surrogate + coef·k), spelt out token by token."""
    generator = torch.Generator().manual_seed(1)
    batch = collate([row(length, generator) for length in (5, 9, 2)])
    logp = (-3 * torch.rand(len(batch.tokens), generator=generator)).requires_grad_()
    common = {"surrogate": "dapo", "correction": "tis"}
    plain = AlgorithmConfig.model_validate(common).build_objective()
    held = AlgorithmConfig.model_validate(common | {"kl": {"estimator": name, "coef": 0.3}}).build_objective()
    without, part = plain(logp, None, batch), held(logp, None, batch)
    assert batch.logp_ref is not None
    total = sum(
        min(math.exp(batch.logp_prox[t] - batch.logp_behav[t]), 2.0)
        * 0.3
        * REFERENCE[name](logp[t].item(), batch.logp_ref[t].item())[0]
        for t in range(len(batch.tokens))
        if batch.mask[t]
    )
    assert (part.loss - without.loss).item() == pytest.approx(total, rel=1e-4)
    assert part.surrogate.item() == without.loss.item()
    assert part.count == without.count


@pytest.mark.parametrize("estimator", REFERENCE)
@pytest.mark.parametrize("where", ["loss", "reward"])
def test_only_k1_in_the_loss_is_refused(estimator: str, where: str) -> None:
    tables = {"estimator": estimator, "where": where}
    if (estimator, where) != ("k1", "loss"):
        assert validate(KLConfig, tables, "here").coef == 1e-3
        return
    with pytest.raises(ConfigError, match="k1 in the loss has zero expected gradient"):
        validate(KLConfig, tables, "here")


def test_unset_there_is_no_kl_at_all() -> None:
    config = AlgorithmConfig.model_validate({"surrogate": "dapo"})
    assert config.build_objective().kl is None
    assert config.build_penalty() is None
