"""What a recipe may combine, and the one line it gets when a combination means nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lockstep.algorithms.config import CORRECTIONS, SURROGATES, AlgorithmConfig
from lockstep.algorithms.corrections._product import Product
from lockstep.algorithms.corrections.tis import TIS
from lockstep.algorithms.corrections.veto import Veto
from lockstep.algorithms.pieces import Companions
from lockstep.assembly.recipe import Recipe
from lockstep.config import ConfigError, choices
from lockstep.config.loading import validate
from lockstep.config.plugins import load_class


def algorithm(surrogate: object, correction: object = None, **others: Any) -> AlgorithmConfig:
    return validate(AlgorithmConfig, {"surrogate": surrogate, "correction": correction, **others}, "recipe")


REFUSED = {
    "acr without its weights": ("acr", "none", r"acr.*undoes what the correction 'tis' does.*use tis with cap = 2"),
    "acr with another weight": ("acr", "geo_tis_band", r"use tis with cap = 2"),
    "acr with a second weight": ("acr", ["tis", "icepop"], r"tis, icepop all weigh the same mismatch"),
    "acr with another cap": ("acr", {"name": "tis", "cap": 8}, r"use tis with cap = 2"),
    "acr of another cap": ({"name": "acr", "cap": 8}, "tis", r"use tis with cap = 8"),
    "ppo_is": ("ppo_is", "tis", r"ppo_is.*holds the sampler's probability.*tis would weigh the mismatch twice"),
    "vanilla_is": ("vanilla_is", "is", r"would weigh the mismatch twice"),
    "decoupled_ppo": ("decoupled_ppo", ["veto", "mis"], r"correction mis would weigh the mismatch twice"),
    "two weights": ("grpo", ["tis", "is", "veto"], r"tis, is all weigh the same mismatch: keep one"),
    "twice the same": ("grpo", ["veto", "veto"], r"one of them twice"),
    "none and one": ("grpo", ["none", "tis"], r'"none" beside others'),
    "no correction at all": ("grpo", [], r'empty list of corrections; say "none"'),
    "not one of ours": ("grpo", ["tis", "vetto"], r"unknown correction 'vetto': did you mean 'veto'\?"),
    "not a name": ("grpo", ["tis", 3], r"expected a name or a table with `name`"),
    "a cap of nothing": ("grpo", {"name": "tis", "cap": 0}, r"tis\.cap: .*above 0"),
    "a band inside out": (
        "tbpo",
        {"name": "geo_tis_band", "cap": 0.5},
        r"band\.cap: .*at least 1",
    ),
    "a band upside down": ("grpo", {"name": "icepop", "low": 6}, r"icepop: low = 6 is above high = 5"),
    "bounds upside down": ("grpo", {"name": "mis", "low": 3}, r"mis: low = 3 is above high = 2"),
    "a clip range of nothing": ({"name": "gspo", "low": -1}, None, r"gspo\.low: .*above 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_means_nothing_is_refused_in_one_line(case: str) -> None:
    surrogate, correction, reason = REFUSED[case]
    with pytest.raises(ConfigError, match=reason) as caught:
        algorithm(surrogate, correction)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("surrogate", choices(SURROGATES))
def test_every_name_alone_is_a_method(surrogate: str) -> None:
    companions = load_class(SURROGATES, surrogate).companions
    chosen = algorithm(surrogate)
    assert [plugin.name for plugin in chosen.correction_plugins] == [companions.correction]
    assert (chosen.advantage_plugin.name, chosen.reduction_plugin.name) == (companions.advantage, companions.reduction)
    assert chosen.replaces_groups == companions.dynamic_sampling
    assert chosen.build_objective().reduction == chosen.reduction_plugin.build()


@pytest.mark.parametrize("surrogate", choices(SURROGATES))
def test_rejecting_goes_with_every_surrogate(surrogate: str) -> None:
    """A rejection is no weight, so nothing is weighed twice; ACR keeps the weight it needs."""
    rejecting = [name for name in choices(CORRECTIONS) if not load_class(CORRECTIONS, name).weighs]
    assert rejecting == ["geo_rs", "none", "veto"]
    needed = ["tis"] if surrogate == "acr" else []
    algorithm(surrogate, [*needed, "geo_rs", "veto"])


def test_acr_shares_its_cap() -> None:
    assert algorithm({"name": "acr", "cap": 3}).build_objective().correction == TIS(cap=3)
    algorithm({"name": "acr", "cap": 3}, {"name": "tis", "cap": 3})
    algorithm("acr", ["tis", "veto"])


def test_a_list_multiplies_and_is_written_back_as_a_list() -> None:
    chosen = algorithm("grpo", [{"name": "tis", "cap": 4}, "veto"])
    correction = chosen.build_objective().correction
    assert correction == Product((TIS(cap=4), Veto()))
    assert correction.bounds == (0, 4)
    assert chosen.model_dump(mode="json")["correction"] == [{"name": "tis", "cap": 4}, "veto"]
    assert AlgorithmConfig.model_validate(chosen.model_dump()) == chosen


class Bare:
    """A surrogate and a correction of the user's own, without what pieces.py asks for."""


class Mine:
    companions: ClassVar[Companions] = Companions(advantage="grpo", reduction="seq_mean")


def test_a_class_of_the_users_own_says_what_it_is() -> None:
    place = Path(__file__)
    with pytest.raises(ConfigError, match=r"Bare' has no companions; see algorithms/pieces\.py"):
        algorithm(f"{place}:Bare")
    with pytest.raises(ConfigError, match=r"Bare' has no weighs; see algorithms/pieces\.py"):
        algorithm("grpo", f"{place}:Bare")
    assert [plugin.name for plugin in algorithm(f"{place}:Mine").correction_plugins] == ["tis"]


class Half:
    """Corrections of the user's own, from one file."""

    weighs: ClassVar[bool] = False
    bounds: ClassVar[tuple[float, float]] = (0, math.inf)


class Third(Half):
    pass


class Weight(Half):
    weighs: ClassVar[bool] = True


def test_pieces_of_the_users_own_go_by_the_names_a_recipe_gives_them(tmp_path: Path) -> None:
    place, other = Path(__file__), tmp_path / "test_algorithm_config.py"
    other.write_text("class Half:\n    weighs = False\n")
    algorithm("grpo", [f"{place}:Half", f"{place}:Third", f"{other}:Half"])
    with pytest.raises(ConfigError, match=f"tis, {place}:Weight all weigh"):
        algorithm("grpo", ["tis", f"{place}:Weight"])
    with pytest.raises(ConfigError, match=f"{place}:Half, {place}:Half: one of them twice"):
        algorithm("grpo", [f"{place}:Half"] * 2)


def test_on_policy_grpo_makes_one_update() -> None:
    tables: dict[str, Any] = {"model": {"init": {}}, "task": "arithmetic", "train": {"steps": 1}}
    tables["algorithm"] = {"surrogate": "on_policy_grpo"}
    validate(Recipe, tables, "recipe")
    with pytest.raises(ConfigError, match=r"'on_policy_grpo' makes one update per step: set learner\.mini_steps"):
        validate(Recipe, tables | {"learner": {"mini_steps": 2}}, "recipe")


def test_a_rejecting_correction_truncates_nothing() -> None:
    assert algorithm("grpo", ["geo_rs", "veto"]).build_objective().correction.bounds == (0, math.inf)
    assert algorithm("grpo", "is").build_objective().correction.bounds == (0, math.inf)
