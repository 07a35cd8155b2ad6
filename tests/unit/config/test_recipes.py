from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

from lockstep.config import Config, ConfigError, Plugin, choices, load, plugin
from lockstep.config.layers import parse_value


class Engine(Config):
    max_tokens: int = Field(256, ge=1)
    """longest answer"""
    stop: tuple[str, ...] = ()
    """strings that end an answer"""


class Recipe(Config):
    name: str
    """of the run"""
    seed: int = 0
    """of everything"""
    rollout: Engine = Engine()
    """sampling"""
    other: Engine | None = None
    """optional"""
    surrogate: Annotated[Plugin, plugin("lockstep.algorithms.surrogates")] = Field("grpo", validate_default=True)  # type: ignore[assignment]
    """loss"""


def recipe(tmp_path: Path, text: str, *overrides: str) -> Recipe:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return load(Recipe, path, overrides)


def test_a_recipe_and_its_overrides(tmp_path: Path) -> None:
    loaded = recipe(
        tmp_path,
        'name = "a"\n[rollout]\nmax_tokens = 7',
        "rollout.max_tokens=9",
        "seed=3",
        'rollout.stop=["x", "y"]',
        "other.max_tokens=1",
        "name=plain text",
        "surrogate=dapo",
    )
    assert (loaded.rollout.max_tokens, loaded.seed, loaded.rollout.stop) == (9, 3, ("x", "y"))
    assert loaded.name == "plain text"
    assert loaded.other is not None
    assert loaded.surrogate.name == "dapo"


@pytest.mark.parametrize(
    ("text", "overrides", "complaint"),
    [
        ('name = "a"\nsede = 1', (), r"recipe.toml: unknown key 'sede'; did you mean 'seed'\?"),
        ('name = "a"\n[rollout]\nmax_token = 1', (), r"unknown key 'rollout.max_token'; did you mean 'max_tokens'\?"),
        ('name = "a"\n[other]\nmaxtokens = 1', (), r"unknown key 'other.maxtokens'; did you mean 'max_tokens'\?"),
        ('name = "a"\n[rollout]\nqqq = 1', (), r"unknown key 'rollout.qqq'; known here: max_tokens, stop"),
        ("seed = 1", (), r"recipe.toml: missing key 'name'"),
        ('name = "a"\nseed = "x"', (), r"recipe.toml: seed: must be a whole number \(got 'x'\)"),
        ('name = "a"', ("rollout.max_tokens=0",), r"^command line: rollout.max_tokens: must be at least 1 \(got 0\)"),
        ('name = "a"\nrollout = 3', (), r"rollout: must be a table of keys \(got 3\)"),
        ('name = "a"', ("seed",), r"^command line: override 'seed' is not of the form key.subkey=value"),
        ('name = "a"', ("=1",), r"override '=1' is not of the form"),
        ('name = "a"', ("name.x=1",), r"override 'name.x=1': name is the plain value 'a' there, not a table"),
        ('name = "a"\nseed = 1', ("seed.x=1",), r"override 'seed.x=1': seed is the plain value 1 there, not a table"),
        ('name = "a"', ("rollout.max_tokens.x.y=1",), r"rollout.max_tokens: must be a whole number"),
        ("name = ", (), r"recipe.toml is not valid TOML: "),
        ('name = "a"\nsurrogate = "dapoo"', (), r"unknown surrogate 'dapoo': did you mean 'dapo'\? choices: .*grpo"),
        ('name = "a"\nsurrogate = 3', (), r"surrogate: expected a name or a table with `name`; choices: "),
        (
            'name = "a"\nsurrogate = {name = "dapo", hihg = 1}',
            (),
            r"unknown option of dapo 'hihg': did you mean 'high'\?",
        ),
        ('name = "a"\nsurrogate = {name = "dapo", high = "x"}', (), r"dapo.high: must be a number \(got 'x'\)"),
    ],
)
def test_complaints_are_one_line_that_names_the_place(
    tmp_path: Path, text: str, overrides: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        recipe(tmp_path, text, *overrides)
    assert "\n" not in str(caught.value).strip()


def test_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no recipe at .*nothing.toml"):
        load(Recipe, tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match="cannot read"):
        load(Recipe, tmp_path)


@pytest.mark.parametrize(
    ("raw", "value"),
    [("3", 3), ("1e-4", 1e-4), ("true", True), ("[1, 2]", [1, 2]), ("a b", "a b"), ('"3"', "3"), ("", "")],
)
def test_override_values(raw: str, value: object) -> None:
    assert parse_value(raw) == value


def test_an_override_cannot_smuggle_in_other_keys() -> None:
    assert parse_value("1\nseed = 5") == "1\nseed = 5"


def test_options_reach_the_plugin(tmp_path: Path) -> None:
    loaded = recipe(tmp_path, 'name = "a"\nsurrogate = {name = "dapo", high = 0.5}')
    assert loaded.surrogate.build().high == 0.5
    assert type(loaded.surrogate.build()) is loaded.surrogate.cls


def test_an_option_is_set_beside_the_name_of_its_plugin(tmp_path: Path) -> None:
    named = 'name = "a"\nsurrogate = "dapo"'
    assert recipe(tmp_path, named, "surrogate.high=0.5").model_dump()["surrogate"] == {"name": "dapo", "high": 0.5}
    with pytest.raises(ConfigError, match=r"unknown option of dapo 'cap': choices: low, high"):
        recipe(tmp_path, named, "surrogate.cap=2")


def test_options_have_the_types_of_their_fields(tmp_path: Path) -> None:
    loaded = recipe(tmp_path, 'name = "a"\nsurrogate = {name = "dapo", high = "2"}')
    assert loaded.surrogate.options == {"high": 2.0}
    assert recipe(tmp_path, 'name = "a"', 'surrogate={name="dapo", high=2}').surrogate == loaded.surrogate
    assert loaded.model_dump(mode="json")["surrogate"] == {"name": "dapo", "high": 2.0}


def test_a_misnamed_class_is_told_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "misnamed_plugins"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "two_words.py").write_text("class Other: ...")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"two_words\.py has no class TwoWords \(in any capitals\)"):
        Plugin(package="misnamed_plugins", name="two_words").build()


@pytest.mark.parametrize(
    "package",
    [
        "lockstep.algorithms.surrogates",
        "lockstep.algorithms.corrections",
        "lockstep.algorithms.advantages",
        "lockstep.algorithms.reductions",
        "lockstep.rollout.engines",
        "lockstep.tasks",
    ],
)
def test_every_file_of_a_plugin_folder_holds_its_class(package: str) -> None:
    found = choices(package)
    assert found
    for name in found:
        assert Plugin(package=package, name=name).cls.__name__.lower() == name.replace("_", "")


FOREIGN = """
from dataclasses import dataclass

@dataclass
class Mine:
    high: float = 0.1

not_a_class = 3
"""


def test_a_class_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_losses.py").write_text(FOREIGN)
    by_path = recipe(tmp_path, f'name = "a"\nsurrogate = {{name = "{tmp_path}/my_losses.py:Mine", high = 0.5}}')
    assert by_path.surrogate.build().high == 0.5
    assert type(by_path.surrogate.build()) is by_path.surrogate.cls  # the file is run once
    monkeypatch.syspath_prepend(tmp_path)
    by_module = recipe(tmp_path, 'name = "a"\nsurrogate = "my_losses:Mine"')
    assert by_module.surrogate.build().high == 0.1


def test_a_file_named_like_a_library_does_not_replace_it(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(FOREIGN)
    recipe(tmp_path, f'name = "a"\nsurrogate = "{tmp_path}/json.py:Mine"')
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nowhere.py:Mine", "cannot load 'nowhere.py:Mine': .*nowhere.py"),
        ("no_such_package.x:Mine", "cannot load 'no_such_package.x:Mine': No module named"),
        ("broken.py:Mine", "cannot load '.*broken.py:Mine': .*invalid syntax"),
        ("raises.py:Mine", "cannot load '.*raises.py:Mine': boom"),
        ("good.py:Other", "cannot load '.*good.py:Other': .*Other"),
        ("good.py:not_a_class", "cannot load '.*good.py:not_a_class': .*not a class"),
    ],
)
def test_a_class_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("def:")
    (tmp_path / "raises.py").write_text("raise ValueError('boom')")
    (tmp_path / "good.py").write_text(FOREIGN)
    with pytest.raises(ConfigError, match=complaint) as caught:
        recipe(tmp_path, f'name = "a"\nsurrogate = "{name}"')
    assert "\n" not in str(caught.value)


def test_a_class_that_is_no_dataclass_takes_no_options() -> None:
    with pytest.raises(ConfigError, match="has no options"):
        plugin("lockstep.algorithms.surrogates").func({"name": f"{__name__}:Plain", "x": 1})  # type: ignore[call-arg]


class Plain:
    pass
