"""Reads a recipe, lays presets and `a.b=c` overrides, validates; complaints name the key, the nearest and the file."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ValidationError
from pydantic.fields import FieldInfo

from lockstep.config.base import Config, ConfigError
from lockstep.config.layers import Stack, stack
from lockstep.config.paths import given_path
from lockstep.config.plugins import Chooser
from lockstep.config.wording import in_plain_words

Model = TypeVar("Model", bound=Config)


def load(model: type[Model], path: Path, overrides: Sequence[str] = ()) -> Model:
    """The recipe at `path` with overrides, as a validated model; ConfigError with one line otherwise."""
    return resolve(model, read_tables(path), overrides, str(path))[0]


def resolve(
    model: type[Model], tables: Mapping[str, Any], overrides: Sequence[str], origin: str
) -> tuple[Model, Stack]:
    """The validated model, and the layers it came from. `origin` is what complaints call the tables."""
    layers = stack(tables, overrides, origin, model.presets, lambda key: _is_choice(model, key))
    return _validate(model, layers.tables, lambda key: layers.blames(key, origin)), layers


def read_tables(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def read_text(path: Path) -> str:
    """The recipe as it was written; ConfigError if it is not there or cannot be read."""
    with given_path(f"cannot read {path}"):
        try:
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ConfigError(f"no recipe at {path}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"cannot read {path}: {error}") from None


def validate(model: type[Model], tables: Mapping[str, Any], origin: str) -> Model:
    """The tables as a model. `origin` is what complaints call them."""
    return _validate(model, tables, lambda key: origin)


def _validate(model: type[Model], tables: Mapping[str, Any], blames: Callable[[str], str]) -> Model:
    try:
        return model.model_validate(tables)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(model, e, blames) for e in error.errors())) from None


def _explain(model: type[BaseModel], error: Any, blames: Callable[[str], str]) -> str:
    loc = [str(part) for part in error["loc"]]
    place = ".".join(loc)
    origin = blames(place)
    if error["type"] == "extra_forbidden":
        known = list(_fields(model, loc[:-1]))
        near = difflib.get_close_matches(loc[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
        return f"{origin}: unknown key {place!r}; {hint}"
    if error["type"] == "missing":
        return f"{origin}: missing key {place!r}"
    message = in_plain_words(error)
    shown = "" if isinstance(error["input"], dict) else f" (got {error['input']!r})"
    return f"{origin}: {place}: {message}{shown}" if place else f"{origin}: {message}"


def _fields(model: type[BaseModel], loc: Sequence[str]) -> Mapping[str, FieldInfo]:
    """The keys of the table at `loc`; none if there is no such table."""
    for part in loc:
        info = model.model_fields.get(part)
        inner = _model_of(info.annotation) if info else None
        if inner is None:
            return {}
        model = inner
    return model.model_fields


def _is_choice(model: type[BaseModel], key: str) -> bool:
    """Whether `key` picks a plug-in."""
    *tables, leaf = key.split(".")
    info = _fields(model, tables).get(leaf)
    metadata = info.metadata if info else ()
    return any(isinstance(item, BeforeValidator) and isinstance(item.func, Chooser) for item in metadata)


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The config model inside `X`, `X | None` or `Annotated[X, …]`."""
    candidates = (annotation, *getattr(annotation, "__args__", ()))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
