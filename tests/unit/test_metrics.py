"""Which names are ours: all that may be logged, and no other, so that a mistyped rule is refused."""

from __future__ import annotations

import re

import pytest

from lockstep.algorithms.diagnostics import TAUS
from lockstep.algorithms.diagnostics.splits import CELLS, LENGTH
from lockstep.config import ConfigError
from lockstep.controller.rules import parse
from lockstep.metrics import METRICS, PARTS, Metric, describe


def test_parts_and_factors_are_those_that_are_computed() -> None:
    assert tuple(cell for part in PARTS for cell in part.cells) == CELLS
    assert all(describe(f"mismatch/f{tau}") and describe(f"mismatch/lag0/f{tau}") for tau in TAUS)
    assert all(describe(f"mismatch/{cell}/accepted_tokens") for cell in LENGTH.cells)


@pytest.mark.parametrize(
    "name",
    [
        "mismatch/lag77/k3",
        "mismatch/lag/k3",
        "mismatch/fooo",
        "mismatch/f1.2",
        "mismatch/adv_up/k3",
        "mismatch/len33/answers",
        "mismatch/lag0/lag0/k3",
        "mismatch/lag0/reward",
        "time/nonsense",
        "warmup/k3",
        "quant/changed/layer",
        "quant/changed/attention",
        "reward/part/",
    ],
)
def test_a_name_that_nothing_logs_is_refused_in_a_rule(name: str) -> None:
    assert describe(name) is None
    with pytest.raises(ConfigError, match=f"unknown metric '{name}'"):
        parse(f"stop when {name} > 1")


@pytest.mark.parametrize("name", ["quant/changed/layer31", "reward/part/correct", "time/learn", "mismatch/prob0.01/k1"])
def test_members_of_families_are_known(name: str) -> None:
    assert describe(name) is not None
    parse(f"warn when {name} > 1")


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_family_says_what_may_stand_for_its_star(metric: Metric) -> None:
    assert ("*" in metric.name) == bool(metric.members or metric.open)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_metric_is_understood_without_its_neighbours(metric: Metric) -> None:
    for text in (metric.meaning, metric.healthy, metric.unhealthy):
        assert not re.search(r"^the same|as above|as below|^those|^these|^their|figures below", text)
