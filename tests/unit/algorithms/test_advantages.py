"""Advantages against brute force, and the exact zeros that matter."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.algorithms.advantages.gae import GAE
from lockstep.algorithms.config import ADVANTAGES
from lockstep.algorithms.pieces import Episodes
from lockstep.config import choices
from lockstep.config.plugins import load_class


def episodes(rewards: list[float], lengths: list[int], values: Tensor | None = None) -> Episodes:
    seq = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Episodes(torch.tensor(rewards, dtype=torch.float64), seq, values)


def z_scores(rewards: list[float]) -> list[float]:
    mean, std = statistics.mean(rewards), statistics.stdev(rewards)
    return [(r - mean) / (std + 1e-6) for r in rewards]


def against_the_others(rewards: list[float]) -> list[float]:
    return [r - statistics.mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]


REFERENCES: dict[str, Callable[[list[float]], list[float]]] = {
    "grpo": z_scores,
    "reinforce_pp": z_scores,
    "positive_grpo": lambda rewards: [max(A, 0.0) for A in z_scores(rewards)],
    "dr_grpo": lambda rewards: [r - statistics.mean(rewards) for r in rewards],
    "rloo": against_the_others,
}
FROM_REWARDS = [name for name in choices(ADVANTAGES) if not load_class(ADVANTAGES, name).needs_values]


@pytest.mark.parametrize("name", FROM_REWARDS)
@given(rewards=st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, -2.0]), min_size=2, max_size=16))
@settings(max_examples=50, deadline=None)
def test_advantages_match_the_reference(name: str, rewards: list[float]) -> None:
    A = load_class(ADVANTAGES, name)()(episodes(rewards, [1] * len(rewards))).tolist()
    if len(set(rewards)) == 1:
        assert set(A) == {0.0}
    else:
        assert pytest.approx(REFERENCES[name](rewards), rel=1e-5, abs=1e-6) == A


@pytest.mark.parametrize("name", FROM_REWARDS)
@pytest.mark.parametrize("rewards", [[0.1] * 7, [1 / 3] * 3, [0.7]])
def test_no_signal_is_exactly_zero_also_in_float32(name: str, rewards: list[float]) -> None:
    group, advantage = episodes(rewards, [3] * len(rewards)), load_class(ADVANTAGES, name)()
    single = Episodes(group.rewards.float(), group.seq)
    assert advantage(group).tolist() == advantage(single).tolist() == [0.0] * 3 * len(rewards)


def brute_force(reward: float, values: list[float], gamma: float, lam: float) -> list[float]:
    """Eq. 16 as printed: a sum over all later errors for every token."""
    after = [*values[1:], 0.0]
    rewards = [0.0] * (len(values) - 1) + [reward]
    errors = [r + gamma * b - a for r, a, b in zip(rewards, values, after, strict=True)]
    return [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, len(errors))) for t in range(len(errors))]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae_matches_brute_force(gamma: float, lam: float) -> None:
    lengths, rewards = [4, 1, 7], [1.0, -0.5, 0.25]
    values = torch.randn(12, generator=torch.Generator().manual_seed(0))
    A = GAE(gamma=gamma, lam=lam)(episodes(rewards, lengths, values))
    for ours, value, reward in zip(A.split(lengths), values.split(lengths), rewards, strict=True):
        assert ours.tolist() == pytest.approx(brute_force(reward, value.tolist(), gamma, lam), rel=1e-5, abs=1e-6)


def test_gae_with_lambda_one_is_reward_minus_value() -> None:
    values = torch.tensor([0.25, 0.5, 0.75])
    assert GAE()(episodes([1.0], [3], values)).tolist() == [0.75, 0.5, 0.25]
