from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from lockstep.assembly.recipe import Recipe
from lockstep.cli import recipe_files
from lockstep.cli.introspection import packages, plugin_options
from lockstep.cli.reference import PAGES, recipe_tables
from lockstep.config import choices, load
from lockstep.config.plugins import load_class
from lockstep.metrics import METRICS

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_committed_page_is_what_the_code_says(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run `make docs`"


def test_recipe_stays_below_80_keys() -> None:
    assert sum(len(table.keys) for table in recipe_tables()) < 80


def test_every_key_says_what_it_means() -> None:
    silent = [f"{table.name}.{key.name}" for table in recipe_tables() for key in table.keys if not key.meaning]
    assert not silent


def test_every_key_of_a_recipe_is_on_the_page() -> None:
    """Walks a validated recipe rather than the models, so that a table the generator overlooks is noticed."""
    listed = {f"{table.name}.{key.name}".lstrip(".") for table in recipe_tables() for key in table.keys}
    listed |= {table.name for table in recipe_tables()}  # one that is left out
    recipe = load(Recipe, recipe_files.find("quickstart")).model_dump(exclude={"task"})
    assert set(_leaves(recipe)) <= listed


def _leaves(tables: dict[str, object], prefix: str = "") -> Iterator[str]:
    for key, value in tables.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def test_page_shows_every_plugin_with_its_options() -> None:
    page = PAGES["config.md"]()
    for package in packages():
        for name in choices(package):
            assert f"### `{name}`" in page
            for option in plugin_options(load_class(package, name)):
                assert f"`{option.name}" in page


@dataclass(frozen=True, kw_only=True)
class Parent:
    size: int
    """How large."""
    shape: str = "round"
    """A parent's shape."""


@dataclass(frozen=True, kw_only=True)
class Child(Parent):
    shape: Literal["round", "square"] = "square"
    """A child's shape,
    told in two lines."""
    rate: float | None = None


def test_options_are_inherited_and_the_subclass_speaks_last() -> None:
    size, shape, rate = plugin_options(Child)
    assert (size.type, size.default, size.meaning) == ("`int`", "required", "How large.")
    assert (shape.type, shape.default) == ('`"round"`, `"square"`', '`"square"`')
    assert shape.meaning == "A child's shape,\ntold in two lines."
    assert (rate.type, rate.default, rate.meaning) == ("`float` or unset", "unset", "")


def test_metrics_page_has_a_row_for_each() -> None:
    page = PAGES["metrics.md"]()
    assert all(f"| `{metric.name}` |" in page for metric in METRICS)


@pytest.mark.parametrize("path", recipe_files.packaged(), ids=lambda path: path.stem)
def test_packaged_recipe_validates_without_a_network(path: Path) -> None:
    assert load(Recipe, path).name == path.stem
    assert recipe_files.first_comment(path), "its first line is what `lockstep recipes` shows"
