"""The reference pages, written from the code they describe: `python -m lockstep.cli.reference docs` (or `make docs`).

Keys come from the config models, options from the plug-ins' dataclasses, metrics from `lockstep.metrics`; a test
compares the pages in docs/ with what this prints, so they cannot drift.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lockstep.assembly.recipe import Recipe
from lockstep.cli.introspection import (
    Key,
    inner_model,
    package_of,
    packages,
    plugin_options,
    shown_default,
    summary,
    type_name,
)
from lockstep.cli.markdown import escape, rows, sentence
from lockstep.cli.method_pages import METHOD_PAGES
from lockstep.config import choices
from lockstep.config.plugins import load_class
from lockstep.metrics import METRICS, PARTS, Metric

_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}

_CONFIG_INTRO = """\
# Config reference

Generated from the config models by `make docs`; do not edit.

A recipe is a TOML file with the tables below. Any key can be set on the command line, in TOML's own syntax:
`lockstep train quickstart train.steps=50 learner.optimiser=muon`. An unknown key is an error that names the nearest
one. `lockstep train RECIPE --dry-run` prints every key with the value it resolves to and where that came from, and
estimates memory. `preset` names a paper's settings to start from ([algorithms/presets.md](algorithms/presets.md)).

Where the type is *plug-in*, the value is the name of a file in the folder named below, or a table with `name` and
that file's options: `surrogate = "dapo"` or `surrogate = {name = "dapo", high = 0.27}`. A name with a colon is a class
of your own: `"my_tasks/poems.py:Poems"` or `"my_package.poems:Poems"`.
"""

_METRICS_INTRO = """\
# Metrics

Generated from `lockstep.metrics` by `make docs`; do not edit.

What a run writes to `metrics.jsonl` and TensorBoard, one row per step. The names are stable. A `*` stands for a
family: `mismatch/f2` is F(2), `reward/part/correct` the part of the reward called `correct`. The last columns say
what a run in good order looks like, and what it means if it does not; `report.html` flags what must be 0 and is not, a
lag above `max_staleness`, a `mismatch/k3` of 1e-3 or more that neither staleness nor low bits of the sampler alone
explain, a `rollout/truncated` that rose above 0.5, and values that are not finite.

Symbols: *l_behav* is the log-prob the sampler gave a token when it drew it, *l_prox* the one the learner gave it at the
start of the step that consumed it, both at the sampling temperature; w = exp(l_prox − l_behav).
"""

_PARTS = """
## Of which tokens

Names marked ▤ are figures of all sampled tokens of a step. Each is also logged for parts of them, with the part's name
before its own: `mismatch/k3`, `mismatch/lag0/k3`, `policy/adv_neg/clip_high`. The number in a part's name is its lower
bound: `pos64` ends where `pos128` begins. Every token is in one part of each kind, so the parts of a kind add up to the
whole; a part without tokens is not logged. What drives decisions reads `lag0`, where sampler and learner had the same
weights and all that is left is mismatch.

| Part | Tokens |
|---|---|
"""


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
    head = ["| Name | | Meaning | Healthy | Unhealthy |", "|---|---|---|---|---|"]
    parts = [f"| `{part.name}` | {sentence(part.meaning)} |\n" for part in PARTS]
    return "\n".join([_METRICS_INTRO, *head, *map(_metric, METRICS), _PARTS]) + "".join(parts)


def _metric(metric: Metric) -> str:
    cells = (sentence(metric.meaning), escape(metric.healthy), escape(metric.unhealthy))
    return f"| `{metric.name}` | {'▤' if metric.parted else ''} | {' | '.join(cells)} |"


def recipe_tables(model: type[BaseModel] = Recipe, name: str = "", about: str = "") -> Iterator[Table]:
    """Every table a recipe may have, with its keys, in the order of the models."""
    inner = {key: found for key, info in model.model_fields.items() if (found := inner_model(info))}
    yield Table(name, about, [_key(key, info) for key, info in model.model_fields.items() if key not in inner])
    for key, found in inner.items():
        yield from recipe_tables(found, f"{name}.{key}".lstrip("."), _about(model.model_fields[key], found))


def _about(info: FieldInfo, model: type[BaseModel]) -> str:
    optional = "" if info.is_required() or info.default is not None else "Optional"
    texts = (optional, info.description or inspect.cleandoc(model.__doc__ or ""))
    return " ".join(f"{sentence(text)}." for text in texts if text)


def _table_section(table: Table) -> str:
    title = f"## `[{table.name}]`" if table.name else "## Top level"
    return "\n\n".join(filter(None, [title, table.about, rows("Key", table.keys)]))


def _package_section(package: str) -> str:
    folder = package.replace("lockstep", "src/lockstep", 1).replace(".", "/")
    return "\n".join([f"## Plug-ins in `{folder}/`\n", *(_plugin(n, load_class(package, n)) for n in choices(package))])


def _plugin(name: str, cls: type) -> str:
    """What its file says it is; below, its options, as a table where they are explained one by one."""
    options = plugin_options(cls)
    lines = [f"### `{name}`\n", f"{summary(sys.modules[cls.__module__])}\n"]
    if any(option.meaning for option in options):
        return "\n".join([*lines, rows("Option", options)])
    if options:
        shown = ", ".join(f"`{option.name} = {option.default.strip('`')}`" for option in options)
        lines += [f"{summary(cls)} Options: {shown}.\n"]
    return "\n".join(lines)


def _key(name: str, info: FieldInfo) -> Key:
    default = "required" if info.is_required() else shown_default(info.default)
    return Key(name, _field_type(info), default, info.description or "")


def _field_type(info: FieldInfo) -> str:
    if package := package_of(info):
        return f"plug-in: {', '.join(f'`{name}`' for name in choices(package))}"
    limits = [(sign, getattr(m, kind, None)) for m in info.metadata for kind, sign in _BOUNDS.items()]
    bounds = ", ".join(f"{sign} {limit:g}" for sign, limit in limits if limit is not None)
    name, unset, _ = type_name(info.annotation).partition(" or unset")
    return f"{name} {bounds}".strip() + unset


PAGES = {"config.md": config_page, "metrics.md": metrics_page} | METHOD_PAGES


def main(arguments: Sequence[str]) -> None:
    (folder,) = arguments
    for name, page in PAGES.items():
        Path(folder, name).parent.mkdir(exist_ok=True)
        Path(folder, name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
