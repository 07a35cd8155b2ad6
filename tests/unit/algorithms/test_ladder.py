"""Which corrections the governor may climb to."""

from __future__ import annotations

import pytest

from lockstep.algorithms.config import CORRECTIONS, AlgorithmConfig
from lockstep.algorithms.ladder import LADDER, stronger
from lockstep.config import choices


def test_every_rung_is_a_correction() -> None:
    assert set(LADDER) <= set(choices(CORRECTIONS))


@pytest.mark.parametrize(
    ("algorithm", "above"),
    [
        ({"surrogate": "grpo", "correction": "none"}, ["tis", "icepop", "mis"]),
        ({"surrogate": "grpo"}, ["icepop", "mis"]),
        ({"surrogate": "grpo", "correction": "mis"}, []),
        ({"surrogate": "grpo", "correction": "seq_tis"}, []),  # not a rung
        ({"surrogate": "grpo", "correction": ["tis", "veto"]}, []),
        ({"surrogate": "acr"}, []),  # needs tis, with its own cap
        ({"surrogate": "ppo_is"}, []),  # holds the weight already
    ],
)
def test_what_is_above(algorithm: dict[str, object], above: list[str]) -> None:
    assert stronger(AlgorithmConfig.model_validate(algorithm)) == above
