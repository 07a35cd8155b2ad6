"""Recipes by name or path."""

from __future__ import annotations

import difflib
from importlib.resources import files
from pathlib import Path

from rich.table import Table
from rich.text import Text

from lockstep.config import ConfigError


def packaged() -> list[Path]:
    folder = Path(str(files("lockstep.recipes")))
    return sorted(folder.glob("*.toml"))


def find(name: str) -> Path:
    """A path if it is one, else a packaged recipe of that name."""
    if name.endswith(".toml") or "/" in name:
        return Path(name)
    by_name = {path.stem: path for path in packaged()}
    if name not in by_name:
        near = difflib.get_close_matches(name, by_name, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"no recipe {name!r}: {hint}known: {', '.join(by_name)}; or give the path of a TOML file")
    return by_name[name]


def listed() -> Table:
    """The packaged recipes, each with what it says of itself."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    for path in packaged():
        grid.add_row(path.stem, Text(first_comment(path)))
    return grid


def first_comment(path: Path) -> str:
    first = path.read_text().splitlines()[0]
    return first.removeprefix("#").strip()
