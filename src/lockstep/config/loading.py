"""Reads a recipe, applies `a.b=c` overrides, validates; every complaint names the key, the nearest one and the file."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from lockstep.config.base import ConfigError

Model = TypeVar("Model", bound=BaseModel)


def load(model: type[Model], path: Path, overrides: Sequence[str] = ()) -> Model:
    """The recipe at `path` with overrides, as a validated model; ConfigError with one line otherwise."""
    return validate(model, load_tables(path, overrides), str(path))


def load_tables(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    try:
        tables = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"no recipe at {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    return override_tables(tables, overrides)


def override_tables(tables: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`tables` with every `a.b=c` applied, in place."""
    for override in overrides:
        _apply(tables, override)
    return tables


def validate(model: type[Model], tables: Mapping[str, Any], origin: str) -> Model:
    try:
        return model.model_validate(tables)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(model, e, origin) for e in error.errors())) from None


def _apply(tables: dict[str, Any], override: str) -> None:
    key, equals, raw = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r} is not of the form key.subkey=value")
    *parents, leaf = key.split(".")
    table: Any = tables
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: {parent} is the plain value {table!r} there, not a table")
    table[leaf] = parse_value(raw)


def parse_value(raw: str) -> Any:
    """A TOML value if it is one (`3`, `1e-4`, `true`, `[1, 2]`), else the text itself."""
    try:
        table = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw
    return table["value"] if len(table) == 1 else raw


def _explain(model: type[BaseModel], error: Any, origin: str) -> str:
    loc = [str(part) for part in error["loc"]]
    place = ".".join(loc)
    if error["type"] == "extra_forbidden":
        known = _fields(model, loc[:-1])
        near = difflib.get_close_matches(loc[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
        return f"{origin}: unknown key {place!r}; {hint}"
    if error["type"] == "missing":
        return f"{origin}: missing key {place!r}"
    message = error["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(error["input"], dict) else f" (got {error['input']!r})"
    return f"{origin}: {place}: {message}{shown}" if place else f"{origin}: {message}"


def _fields(model: type[BaseModel], loc: Sequence[str]) -> list[str]:
    for part in loc:
        info = model.model_fields.get(part)
        inner = _model_of(info.annotation) if info else None
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The config model inside `X`, `X | None` or `Annotated[X, …]`."""
    candidates = (annotation, *getattr(annotation, "__args__", ()))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
