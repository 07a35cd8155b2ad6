"""A recipe's values in layers: a preset below, the file's own keys, the command line on top. Each value has an origin.

From weak to strong: defaults < the file's preset < the file's keys < a preset on the command line < its other keys.
A preset on the command line takes the place of the file's, and clears what makes up a method before it sets its own.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from lockstep.config.base import ConfigError
from lockstep.config.plugins import unknown

COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True)
class Presets:
    """TOML files a recipe may build on: `preset = "qurl"` lays qurl.toml of `package` under the recipe's own keys."""

    package: str
    owns: tuple[str, ...]  # "algorithm.surrogate", …: what the presets are about, cleared by one on the command line
    notes: str  # a table of theirs that is for readers and is never applied

    def names(self) -> list[str]:
        return sorted(path.stem for path in self._folder.glob("*.toml"))

    def path(self, name: object) -> Path:
        if name not in self.names():
            raise ConfigError(unknown("preset", str(name), self.names()))
        return self._folder / f"{name}.toml"

    def read(self, name: object) -> dict[str, Any]:
        tables = tomllib.loads(self.path(name).read_text(encoding="utf-8"))
        return {key: table for key, table in tables.items() if key != self.notes}

    @property
    def _folder(self) -> Path:
        return Path(str(files(self.package)))


@dataclass(slots=True)
class Stack:
    """Tables as they are after all layers, and which layer each value came from."""

    is_choice: Callable[[str], bool]  # whether a key picks a plug-in, which has options
    tables: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)  # "learner.mini_steps" → "preset qurl"

    def lay(self, tables: Mapping[str, Any], origin: str) -> None:
        self._lay(self.tables, tables, origin, "")

    def _lay(self, below: dict[str, Any], above: Mapping[str, Any], origin: str, prefix: str) -> None:
        """Tables are joined key by key; one with a `name` is a choice with its options, and replaces another whole."""
        for key, value in above.items():
            if isinstance(value, Mapping) and "name" not in value and isinstance(below.setdefault(key, {}), dict):
                self._lay(below[key], value, origin, f"{prefix}{key}.")
            else:
                below[key] = deepcopy(value)
                self._mark(prefix + key, origin)

    def override(self, text: str) -> None:
        """Sets what `a.b=c` says; an option of a plug-in that has so far only been named is set beside its name."""
        key, equals, raw = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"override {text!r} is not of the form key.subkey=value")
        *parents, leaf = key.split(".")
        table: Any = self.tables
        for depth, parent in enumerate(parents, start=1):
            inner = table.setdefault(parent, {})
            if isinstance(inner, str) and self.is_choice(".".join(parents[:depth])):
                inner = table[parent] = {"name": inner}
            if not isinstance(inner, dict):
                raise ConfigError(f"override {text!r}: {parent} is the plain value {inner!r} there, not a table")
            table = inner
        table[leaf] = parse_value(raw)
        self._mark(key, COMMAND_LINE)

    def clear(self, keys: Sequence[str]) -> None:
        for key in keys:
            parent, _, leaf = key.rpartition(".")
            table = self.tables.get(parent)
            if isinstance(table, dict):
                table.pop(leaf, None)
            self.origins = {k: v for k, v in self.origins.items() if k != key and not k.startswith(f"{key}.")}

    def origin(self, key: str) -> str | None:
        """Where the value of `key`, or the table or choice it is part of, came from; None for a default."""
        while key and key not in self.origins:
            key = key.rpartition(".")[0]
        return self.origins.get(key)

    def blames(self, key: str, origin: str) -> str:
        """Where to look for what is wrong with `key`: the command line, the file (`origin`), or both if it is a table
        that has values from either."""
        if self.origin(key) == COMMAND_LINE:
            return COMMAND_LINE
        if preset := self.tables.get("preset"):
            origin = f"{origin} with preset {preset!r}"
        inside = f"{key}." if key else ""
        given = any(o == COMMAND_LINE and k.startswith(inside) for k, o in self.origins.items())
        return f"{origin} and the {COMMAND_LINE}" if given else origin

    def _mark(self, key: str, origin: str) -> None:
        self.origins = {k: v for k, v in self.origins.items() if not k.startswith(f"{key}.")} | {key: origin}


def stack(
    tables: Mapping[str, Any],
    overrides: Sequence[str],
    origin: str,
    presets: Presets | None,
    is_choice: Callable[[str], bool],
) -> Stack:
    """All layers of one recipe, whose file is `origin`; ConfigError names the layer that cannot be laid."""
    made = Stack(is_choice)
    given = [parse_value(text.partition("=")[2]) for text in overrides if text.startswith("preset=")]
    if presets and not given and tables.get("preset"):
        with _blaming(origin):
            made.lay(presets.read(tables["preset"]), f"preset {tables['preset']}")
    made.lay(tables, Path(origin).name)
    with _blaming(COMMAND_LINE):
        if presets and given and given[-1]:
            made.clear(presets.owns)
            made.lay(presets.read(given[-1]), f"preset {given[-1]}")
        for text in overrides:
            made.override(text)
    return made


@contextmanager
def _blaming(origin: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None


def parse_value(raw: str) -> Any:
    """A TOML value if it is one (`3`, `1e-4`, `true`, `[1, 2]`), else the text itself."""
    try:
        table = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw
    return table["value"] if len(table) == 1 else raw
