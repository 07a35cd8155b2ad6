"""Layers of a recipe, and the presets that come along."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest

from lockstep.assembly.recipe import PRESETS
from lockstep.assembly.recipe import Recipe as RealRecipe
from lockstep.cli import recipe_files
from lockstep.config import Config, ConfigError, Plugin, load, plugin, resolve
from lockstep.config.layers import Presets, Stack


class Algorithm(Config):
    surrogate: Annotated[Plugin, plugin("lockstep.algorithms.surrogates")]
    """loss"""
    reduction: Annotated[Plugin | None, plugin("lockstep.algorithms.reductions")] = None
    """mean"""
    truncated: str = "mask"
    """long answers"""


class Learner(Config):
    mini_steps: int = 1
    """updates"""
    rate: float = 1.0
    """step size"""


class Recipe(Config):
    presets: ClassVar[Presets | None] = Presets(
        "made_up_presets", owns=("algorithm.surrogate", "algorithm.reduction"), notes="paper"
    )
    preset: str = ""
    """below"""
    algorithm: Algorithm
    learner: Learner = Learner()


CLIP = """
[algorithm]
surrogate = {name = "dapo", high = 0.5}
reduction = "seq_mean"
[learner]
mini_steps = 4
[paper]
rate = 3.0
"""
PLAIN = """
[algorithm]
surrogate = {name = "grpo"}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "made_up_presets"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "clip.toml").write_text(CLIP)
    (package / "plain.toml").write_text(PLAIN)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def recipe(folder: Path, text: str, *overrides: str) -> tuple[Recipe, Stack]:
    return resolve(Recipe, tomllib.loads(text), overrides, str(folder / "my.toml"))


def method(loaded: Recipe) -> tuple[str, dict[str, Any], str | None]:
    algorithm = loaded.algorithm
    return algorithm.surrogate.name, dict(algorithm.surrogate.options), algorithm.reduction and algorithm.reduction.name


def test_a_preset_lies_under_the_keys_of_its_file(folder: Path) -> None:
    loaded, layers = recipe(folder, 'preset = "clip"\n[learner]\nrate = 2.0')
    assert method(loaded) == ("dapo", {"high": 0.5}, "seq_mean")
    assert (loaded.learner.mini_steps, loaded.learner.rate) == (4, 2.0), "notes of a preset are not applied"
    assert layers.origin("learner.mini_steps") == layers.origin("algorithm.surrogate.high") == "preset clip"
    assert layers.origin("learner.rate") == "my.toml"
    assert layers.origin("algorithm.truncated") is None


def test_the_file_adjusts_an_option_or_chooses_anew(folder: Path) -> None:
    adjusted, layers = recipe(folder, 'preset = "clip"\n[algorithm.surrogate]\nlow = 0.1')
    assert method(adjusted)[:2] == ("dapo", {"high": 0.5, "low": 0.1})
    assert layers.origin("algorithm.surrogate.low") == "my.toml"
    assert layers.origin("algorithm.surrogate.high") == "preset clip"
    for choice in ('surrogate = "grpo"', 'surrogate = {name = "grpo"}'):
        anew, _ = recipe(folder, f'preset = "clip"\n[algorithm]\n{choice}')
        assert method(anew)[:2] == ("grpo", {}), "options of the choice before do not leak"


def test_a_preset_on_the_command_line_beats_the_file_and_leaves_the_rest(folder: Path) -> None:
    text = """
    preset = "clip"
    [algorithm]
    surrogate = {name = "dapo", low = 0.1}
    reduction = "token_mean"
    truncated = "keep"
    [learner]
    rate = 2.0
    """
    loaded, layers = recipe(folder, text, "preset=plain", "learner.rate=5.0")
    assert method(loaded) == ("grpo", {}, None), "neither the file's method nor its preset is left"
    assert (loaded.preset, loaded.algorithm.truncated, loaded.learner) == ("plain", "keep", Learner(rate=5.0))
    assert layers.origin("algorithm.surrogate") == "preset plain"
    assert layers.origin("learner.rate") == layers.origin("preset") == "command line"


def test_keys_of_the_command_line_beat_its_preset_wherever_they_stand(folder: Path) -> None:
    before, _ = recipe(folder, "", "algorithm.surrogate.high=0.9", "preset=clip")
    after, _ = recipe(folder, "", "preset=clip", "algorithm.surrogate.high=0.9")
    assert method(before) == method(after) == ("dapo", {"high": 0.9}, "seq_mean")


def test_a_resolved_recipe_resolves_to_itself(folder: Path) -> None:
    loaded, _ = recipe(folder, 'preset = "clip"', "algorithm.surrogate=grpo", "learner.mini_steps=1")
    again, _ = resolve(Recipe, loaded.model_dump(mode="json"), [], "config.json")
    assert again == loaded


@pytest.mark.parametrize(
    ("text", "overrides", "complaint"),
    [
        ('preset = "clop"', (), r"my.toml: unknown preset 'clop': did you mean 'clip'\? choices: clip, plain"),
        ("preset = 3", (), r"my.toml: unknown preset '3': choices: clip, plain"),
        ('preset = "clip"', ("preset=../clip",), r"^command line: unknown preset '../clip'"),
        ('preset = "clip"\n[algorithm.surrogate]\nhihg=1', (), r"my.toml with preset 'clip': .*did you mean 'high'\?"),
    ],
)
def test_complaints_name_the_file(folder: Path, text: str, overrides: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        recipe(folder, text, *overrides)


def test_a_model_without_presets_does_not_know_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key 'preset'"):
        resolve(Learner, {"preset": "clip"}, [], "x.toml")


NAMES = PRESETS.names()
NUMBER = re.compile(r"[=\s{\[]-?\d+(\.\d+)?(e-?\d+)?\b")


def test_the_papers_presets_are_there() -> None:
    assert {"qurl", "qarl-tbpo", "r3-grpo", "flashrl-tis", "dapo", "gspo"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_preset_validates_with_the_quickstart(name: str) -> None:
    quickstart = recipe_files.find("quickstart")
    loaded = load(RealRecipe, quickstart, [f"preset={name}"])
    written = PRESETS.read(name)
    assert loaded.preset == name
    assert loaded.algorithm.surrogate.name == written["algorithm"]["surrogate"]["name"]
    assert loaded.learner.learning_rate == load(RealRecipe, quickstart).learner.learning_rate
    loaded.algorithm.build_objective()


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_a_preset_has_a_source(name: str) -> None:
    """In a comment on its line, or the words `not stated`."""
    for line in PRESETS.path(name).read_text().splitlines():
        code, _, comment = line.partition("#")
        if NUMBER.search(re.sub(r'"[^"]*"', '""', code)):
            assert re.search(r"Sec\.|Eq\.|Table|App\.|not stated|ablation|training|setting", comment), line


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_of_a_preset_says_where_it_is_from(name: str) -> None:
    lines = [line for line in PRESETS.path(name).read_text().splitlines() if re.match(r"\w+ = ", line)]
    assert all("#" in line or "not stated" in line for line in lines)
    first = PRESETS.path(name).read_text().splitlines()[0]
    assert first.startswith("# "), "its first line is what `lockstep explain` lists"
    assert "paper" in tomllib.loads(PRESETS.path(name).read_text())
