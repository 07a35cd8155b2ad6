"""Which corrections the governor may climb to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.algorithms.config import CORRECTIONS, AlgorithmConfig
from lockstep.algorithms.ladder import LADDER, as_rung, stronger
from lockstep.config import choices
from lockstep.types import Batch


def test_every_rung_is_a_correction() -> None:
    assert set(LADDER) <= set(choices(CORRECTIONS))


@pytest.mark.parametrize(
    ("algorithm", "above"),
    [
        ({"surrogate": "grpo", "correction": "none"}, ["tis", "icepop"]),
        ({"surrogate": "grpo"}, ["icepop"]),
        ({"surrogate": "grpo", "correction": "icepop"}, []),
        ({"surrogate": "grpo", "correction": {"name": "tis", "cap": 0.4}}, []),  # below icepop's lower bound
        ({"surrogate": "grpo", "correction": "mis"}, []),  # of whole sequences
        ({"surrogate": "grpo", "correction": "seq_tis"}, []),  # not a rung
        ({"surrogate": "grpo", "correction": ["tis", "veto"]}, []),
        ({"surrogate": "acr"}, []),  # needs tis, with its own cap
        ({"surrogate": "ppo_is"}, []),  # holds the weight already
    ],
)
def test_what_is_above(algorithm: dict[str, object], above: list[str]) -> None:
    assert stronger(AlgorithmConfig.model_validate(algorithm)) == above


def weights(logp_prox: Tensor, logp_behav: Tensor, cap: float) -> list[Tensor]:
    """What each rung gives these tokens, from a recipe whose tis has this cap."""
    n, zeros = len(logp_prox), torch.zeros(len(logp_prox))
    batch = Batch(
        tokens=zeros.long(),
        positions=torch.arange(n),
        cu_seqlens=torch.tensor([0, n], dtype=torch.int32),
        seq=zeros.long(),
        mask=torch.ones(n, dtype=torch.bool),
        logp_behav=logp_behav,
        logp_prox=logp_prox,
        advantage=zeros,
        lag=zeros.int(),
        temperature=1.0,
        max_seqlen=n,
    )
    own = AlgorithmConfig.model_validate({"surrogate": "grpo", "correction": {"name": "tis", "cap": cap}})
    corrections: list[Any] = ["none", {"name": "tis", "cap": cap}, as_rung(own, "icepop")]
    built = [AlgorithmConfig.model_validate({"surrogate": "grpo", "correction": c}) for c in corrections]
    return [algorithm.build_objective().correction(batch) for algorithm in built]


caps = st.floats(0.5, 20)


@given(st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=20), caps)
def test_from_tis_on_no_token_weighs_more_on_a_higher_rung(log_w: list[float], cap: float) -> None:
    _, tis, icepop = weights(torch.tensor(log_w), torch.zeros(len(log_w)), cap)
    assert (icepop <= tis).all()
    assert ((icepop == tis) | (icepop == 0)).all()


@given(st.integers(0, 10**6), st.floats(0.1, 8), caps)
def test_the_mean_weight_under_the_sampler_never_grows(seed: int, spread: float, cap: float) -> None:
    """Over a whole vocabulary: the exact expectation for one token."""
    logp = (spread * torch.randn(2, 50, generator=torch.Generator().manual_seed(seed))).log_softmax(-1)
    means = [float((logp[1].exp() * weight).sum()) for weight in weights(logp[0], logp[1], cap)]
    assert means[0] + 1e-5 >= means[1] >= means[2]


def test_a_rung_has_the_same_options_however_it_was_reached() -> None:
    """Climbed one by one, or restored by a resume at once from the recipe's own."""
    base = AlgorithmConfig.model_validate({"surrogate": "grpo", "correction": "none"})
    climbed = AlgorithmConfig.model_validate({"surrogate": "grpo", "correction": as_rung(base, "tis")})
    assert as_rung(climbed, "icepop") == as_rung(base, "icepop") == {"name": "icepop", "high": 2.0}
    own = AlgorithmConfig.model_validate({"surrogate": "grpo", "correction": {"name": "tis", "cap": 8}})
    assert as_rung(own, "icepop") == {"name": "icepop", "high": 8.0}
