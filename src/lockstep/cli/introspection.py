"""What code says about itself: the options of a plug-in, their defaults and meanings, the folders recipes pick from."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from dataclasses import dataclass
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from lockstep.assembly.recipe import Recipe
from lockstep.config import Plugin
from lockstep.config.plugins import Chooser


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the recipe, or an option of a plug-in."""

    name: str
    type: str
    default: str
    meaning: str


def recipe_keys(model: type[BaseModel] = Recipe, prefix: str = "") -> dict[str, str]:
    """The folders that recipes pick plug-ins from, each with the key that picks: "algorithm.surrogate"."""
    found: dict[str, str] = {}
    for key, info in model.model_fields.items():
        package, inner = package_of(info), inner_model(info)
        found |= {package: prefix + key} if package else recipe_keys(inner, f"{prefix}{key}.") if inner else {}
    return found


def packages() -> list[str]:
    return list(recipe_keys())


def package_of(info: FieldInfo) -> str | None:
    """The folder a field picks from; None if its value is not a plug-in."""
    validators = (item.func for item in info.metadata if isinstance(item, BeforeValidator))
    return next((function.package for function in validators if isinstance(function, Chooser)), None)


def plugin_options(cls: type) -> list[Key]:
    """The fields of a plug-in's dataclass, inherited ones first; a class that is none takes no options."""
    if not dataclasses.is_dataclass(cls):
        return []
    meanings, types = attribute_docstrings(cls), get_type_hints(cls)
    return [
        Key(f.name, type_name(types[f.name]), shown_default(f.default), meanings.get(f.name, ""))
        for f in dataclasses.fields(cls)
    ]


def attribute_docstrings(cls: type) -> dict[str, str]:
    """The string after a field, as pydantic reads it from config models; a subclass's own comes last and wins."""
    found: dict[str, str] = {}
    for owner in reversed([base for base in cls.__mro__ if dataclasses.is_dataclass(base)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = inspect.cleandoc(str(text.value.value))
    return found


def inner_model(info: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a table."""
    arms = () if package_of(info) else (info.annotation, *get_args(info.annotation))
    return next((arm for arm in arms if isinstance(arm, type) and issubclass(arm, BaseModel)), None)


def summary(documented: object) -> str:
    text = (inspect.getdoc(documented) or "").partition("\n\n")[0].replace("\n", " ")
    return text if text.endswith(".") else f"{text}."


def type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join("unset" if arm is NoneType else type_name(arm) for arm in arguments)
    if origin is tuple:
        return f"list of {type_name(arguments[0])}"
    return f"`{annotation.__name__}`"


def shown_default(value: object) -> str:
    """As a recipe would write it."""
    if value is dataclasses.MISSING:
        return "required"
    if value is None:
        return "unset"
    plain = value.name if isinstance(value, Plugin) else value
    return f"`{plain:g}`" if isinstance(plain, float) else f"`{json.dumps(plain)}`"
