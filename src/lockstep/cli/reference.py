"""The reference pages, written from the code they describe: `python -m lockstep.cli.reference docs` (or `make docs`).

Keys come from the config models, options from the plug-ins' dataclasses, metrics from `lockstep.metrics`; a test
compares the pages in docs/ with what this prints, so they cannot drift.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from lockstep.assembly.recipe import Recipe
from lockstep.config import Plugin, choices
from lockstep.config.plugins import Chooser, load_class
from lockstep.metrics import METRICS

_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}

_CONFIG_INTRO = """\
# Config reference

Generated from the config models by `make docs`; do not edit.

A recipe is a TOML file with the tables below. Any key can be set on the command line, in TOML's own syntax:
`lockstep train quickstart train.steps=50 learner.optimiser=muon`. An unknown key is an error that names the nearest
one. `lockstep train RECIPE --dry-run` prints every key with the value it resolves to, and an estimate of memory.

Where the type is *plug-in*, the value is the name of a file in the folder named below, or a table with `name` and
that file's options: `surrogate = "dapo"` or `surrogate = {name = "dapo", high = 0.27}`. A name with a colon is a class
of your own: `"my_tasks/poems.py:Poems"` or `"my_package.poems:Poems"`.
"""

_METRICS_INTRO = """\
# Metrics

Generated from `lockstep.metrics` by `make docs`; do not edit.

What a run writes to `metrics.jsonl` and TensorBoard, one row per step. The names are stable. A `*` stands for a
family: `mismatch/f2` is F(2), `reward/part/correct` the part of the reward called `correct`. The last column says
what a run in good order looks like; `report.html` flags what must be 0 and is not, a lag above `max_staleness`, a
`mismatch/k3` of 1e-3 or more though `max_staleness` is 0, a `rollout/truncated` that rose above 0.5, and values that
are not finite.

Symbols: *l_behav* is the log-prob the sampler gave a token when it drew it, *l_prox* the one the learner gave it at the
start of the step that consumed it, both at the sampling temperature; w = exp(l_prox − l_behav).
"""


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the recipe, or an option of a plug-in."""

    name: str
    type: str
    default: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the recipe; the keys that stand before all tables have the name ""."""

    name: str  # "learner.schedule"
    about: str
    keys: list[Key]


def config_page() -> str:
    tables = list(recipe_tables())
    count = f"{sum(len(table.keys) for table in tables)} keys, and the options of the plug-ins.\n"
    return "\n".join([_CONFIG_INTRO, count, *map(_table_section, tables), *map(_package_section, packages())])


def metrics_page() -> str:
    rows = [f"| `{metric.name}` | {_sentence(metric.meaning)} | {_escape(metric.healthy)} |" for metric in METRICS]
    return "\n".join([_METRICS_INTRO, "| Name | Meaning | Healthy |", "|---|---|---|", *rows, ""])


def recipe_tables(model: type[BaseModel] = Recipe, name: str = "", about: str = "") -> Iterator[Table]:
    """Every table a recipe may have, with its keys, in the order of the models."""
    inner = {key: found for key, info in model.model_fields.items() if (found := _inner_model(info))}
    yield Table(name, about, [_key(key, info) for key, info in model.model_fields.items() if key not in inner])
    for key, found in inner.items():
        yield from recipe_tables(found, f"{name}.{key}".lstrip("."), _about(model.model_fields[key], found))


def _about(info: FieldInfo, model: type[BaseModel]) -> str:
    optional = "" if info.is_required() or info.default is not None else "Optional"
    sentences = (optional, info.description or inspect.cleandoc(model.__doc__ or ""))
    return " ".join(f"{_sentence(sentence)}." for sentence in sentences if sentence)


def packages(model: type[BaseModel] = Recipe) -> list[str]:
    """The folders that recipes pick plug-ins from."""
    found: list[str] = []
    for info in model.model_fields.values():
        package, inner = package_of(info), _inner_model(info)
        found += [package] if package else packages(inner) if inner else []
    return found


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
        Key(f.name, _type(types[f.name]), _default(f.default), meanings.get(f.name, ""))
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


def _table_section(table: Table) -> str:
    title = f"## `[{table.name}]`" if table.name else "## Top level"
    return "\n\n".join(filter(None, [title, table.about, _rows("Key", table.keys)]))


def _package_section(package: str) -> str:
    folder = package.replace("lockstep", "src/lockstep", 1).replace(".", "/")
    return "\n".join([f"## Plug-ins in `{folder}/`\n", *(_plugin(n, load_class(package, n)) for n in choices(package))])


def _plugin(name: str, cls: type) -> str:
    """What its file says it is; below, its options, as a table where they are explained one by one."""
    options = plugin_options(cls)
    lines = [f"### `{name}`\n", f"{_summary(sys.modules[cls.__module__])}\n"]
    if any(option.meaning for option in options):
        return "\n".join([*lines, _rows("Option", options)])
    if options:
        shown = ", ".join(f"`{option.name} = {option.default.strip('`')}`" for option in options)
        lines += [f"{_summary(cls)} Options: {shown}.\n"]
    return "\n".join(lines)


def _summary(documented: object) -> str:
    text = (inspect.getdoc(documented) or "").partition("\n\n")[0].replace("\n", " ")
    return text if text.endswith(".") else f"{text}."


def _rows(first: str, keys: Iterable[Key]) -> str:
    rows = [f"| `{key.name}` | {key.type} | {key.default} | {_sentence(key.meaning)} |" for key in keys]
    return "\n".join([f"| {first} | Type | Default | Meaning |", "|---|---|---|---|", *rows, ""])


def _key(name: str, info: FieldInfo) -> Key:
    default = "required" if info.is_required() else _default(info.default)
    return Key(name, _field_type(info), default, info.description or "")


def _field_type(info: FieldInfo) -> str:
    if package := package_of(info):
        return f"plug-in: {', '.join(f'`{name}`' for name in choices(package))}"
    limits = [(sign, getattr(m, kind, None)) for m in info.metadata for kind, sign in _BOUNDS.items()]
    bounds = ", ".join(f"{sign} {limit:g}" for sign, limit in limits if limit is not None)
    name, unset, _ = _type(info.annotation).partition(" or unset")
    return f"{name} {bounds}".strip() + unset


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join("unset" if arm is NoneType else _type(arm) for arm in arguments)
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    return f"`{annotation.__name__}`"


def _default(value: object) -> str:
    """As a recipe would write it."""
    if value is dataclasses.MISSING:
        return "required"
    if value is None:
        return "unset"
    plain = value.name if isinstance(value, Plugin) else value
    return f"`{plain:g}`" if isinstance(plain, float) else f"`{json.dumps(plain)}`"


def _inner_model(info: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a table."""
    arms = () if package_of(info) else (info.annotation, *get_args(info.annotation))
    return next((arm for arm in arms if isinstance(arm, type) and issubclass(arm, BaseModel)), None)


def _sentence(text: str) -> str:
    """With a capital and without a full stop, whichever way its author wrote it."""
    line = _escape(text).rstrip(".")
    return line[:1].upper() + line[1:]


def _escape(text: str) -> str:
    """As one cell of a table."""
    return text.replace("|", "\\|").replace("<", "\\<").replace("\n", " ")


PAGES = {"config.md": config_page, "metrics.md": metrics_page}


def main(arguments: Sequence[str]) -> None:
    (folder,) = arguments
    for name, page in PAGES.items():
        Path(folder, name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
