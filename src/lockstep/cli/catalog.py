"""Everything that can be explained, as its source explains it: what `lockstep explain` and docs/algorithms print."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from lockstep import metrics
from lockstep.algorithms.config import ADVANTAGES, CORRECTIONS, REDUCTIONS, SURROGATES, AlgorithmConfig
from lockstep.algorithms.pieces import Companions
from lockstep.algorithms.reference import ESTIMATORS, KLConfig
from lockstep.algorithms.symbols import legend
from lockstep.assembly.recipe import PRESETS
from lockstep.cli.explainable import FAMILIES, names
from lockstep.cli.introspection import Key, plugin_options, recipe_keys, shown_default, type_name
from lockstep.config import ConfigError, choices
from lockstep.config.plugins import load_class
from lockstep.controller import governor, rules
from lockstep.controller.governor import DEFAULT_RULES, GovernorConfig
from lockstep.controller.rules import ACTIONS, Rule, parse
from lockstep.learner import routing_modes
from lockstep.learner.routing_modes import ROUTING_MODES
from lockstep.protocols import GOVERNOR

PAGES = {
    package: f"docs/algorithms/{package.rpartition('.')[2]}.md"
    for package in (PRESETS.package, SURROGATES, CORRECTIONS, ADVANTAGES, REDUCTIONS, ESTIMATORS)
}
"""Where the docs show a family."""
GOVERNOR_PAGE, ROUTING_PAGE = "docs/governor.md", "docs/expert-routes.md"
SHIPPED = [parse(text) for text in DEFAULT_RULES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One thing with a name. What does not apply to it is empty."""

    name: str
    kind: str
    package: str = ""  # of a plug-in
    summary: str  # what it is, and whose
    source: Path
    line: int | None = None
    equation: tuple[str, ...] = ()  # line by line, the main one first
    notes: str = ""  # what else its source says
    usage: str = ""  # as a recipe says it
    options: tuple[Key, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()  # ("usual reduction", "token_mean")
    text: str = ""  # a preset's own
    page: str = ""  # of the docs

    @property
    def symbols(self) -> dict[str, str]:
        """What the letters of the equation stand for, where it is one of an objective."""
        return legend(" ".join(self.equation)) if self.package.startswith("lockstep.algorithms.") else {}

    @property
    def refuses(self) -> list[tuple[str, str]]:
        """Names it cannot be combined with, and why."""
        refusals = _REFUSALS.get(self.package)
        return list(refusals(self.name)) if refusals else []

    @property
    def links(self) -> list[str]:
        told = f"{self.summary} {self.notes}"
        papers = [f"https://arxiv.org/abs/{found}" for found in re.findall(r"arXiv:(\d{4}\.\d{4,5})", told)]
        reviews = [f"https://openreview.net/forum?id={found}" for found in re.findall(r"OpenReview (\w+)", told)]
        return list(dict.fromkeys(papers + reviews))


def find(name: str) -> list[Entry]:
    """All that goes by a name: `grpo` is a surrogate and an advantage. ConfigError with the nearest if none does."""
    presets = [preset_entry(name)] if name in PRESETS.names() else []
    plugins = [plugin_entry(package, name) for package in FAMILIES if name in choices(package)]
    governing = [entry for entry in governing_entries() if entry.name == name]
    routing = [entry for entry in routing_entries() if entry.name == name]
    found = presets + plugins + routing + governing + _metrics_called(name)
    if not found:
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"nothing is called {name!r}: {hint}`lockstep explain` lists every name")
    return found


def methods() -> Iterator[Entry]:
    """Presets, then the plug-ins of every family."""
    yield from map(preset_entry, PRESETS.names())
    for package in FAMILIES:
        yield from family(package)


def family(package: str) -> Iterator[Entry]:
    return (plugin_entry(package, name) for name in choices(package))


def plugin_entry(package: str, name: str) -> Entry:
    cls = load_class(package, name)
    first, _, rest = (inspect.getdoc(cls) or "").partition("\n\n")
    facts = _FACTS.get(package)
    return Entry(
        name=name,
        kind=FAMILIES[package],
        package=package,
        summary=" ".join((inspect.getdoc(sys.modules[cls.__module__]) or "").split()),
        source=Path(inspect.getsourcefile(cls) or ""),
        line=inspect.getsourcelines(cls)[1],
        equation=tuple(part.strip() for part in " ".join(first.split("\n")).split(";  ")),
        notes=rest,
        usage=_usage(package, name),
        options=tuple(plugin_options(cls)),
        facts=tuple(facts(cls)) if facts else (),
        page=PAGES.get(package, ""),
    )


def preset_entry(name: str) -> Entry:
    path = PRESETS.path(name)
    head, _, text = path.read_text(encoding="utf-8").partition("\n\n")
    summary, _, notes = "\n".join(line.removeprefix("#").strip() for line in head.splitlines()).partition("\n\n")
    return Entry(
        name=name,
        kind="preset",
        summary=summary,
        source=path,
        notes=notes,
        usage=f'preset = "{name}"',
        text=text,
        page=PAGES[PRESETS.package],
    )


def metric_entry(metric: metrics.Metric) -> Entry:
    told = [("healthy", metric.healthy), ("unhealthy", metric.unhealthy)]
    return Entry(
        name=metric.name,
        kind="metric",
        summary=metric.meaning,
        source=Path(metrics.__file__),
        facts=tuple((label, text) for label, text in told if text),
        page="docs/metrics.md",
    )


def routing_entries() -> Iterator[Entry]:
    for name, summary in ROUTING_MODES.items():
        source = Path(routing_modes.__file__)
        usage = f'learner.routing = "{name}"'
        yield Entry(name=name, kind="routing mode", summary=summary, source=source, usage=usage, page=ROUTING_PAGE)


def governing_entries() -> Iterator[Entry]:
    yield _governor()
    yield from map(_action, ACTIONS)
    yield from map(_rule, SHIPPED)


def _governor() -> Entry:
    return Entry(
        name=GOVERNOR,
        kind="governor",
        summary=inspect.cleandoc(GovernorConfig.__doc__ or ""),
        source=Path(governor.__file__),
        usage='governor.mode = "active"',
        options=tuple(
            Key(name, type_name(info.annotation), shown_default(info.default), info.description or "")
            for name, info in GovernorConfig.model_fields.items()
        ),
        facts=(("actions", ", ".join(ACTIONS)), ("rules", ", ".join(rule.name for rule in SHIPPED))),
        page=GOVERNOR_PAGE,
    )


def _action(name: str) -> Entry:
    asking = [rule.name for rule in SHIPPED if name in rule.actions]
    return Entry(
        name=name,
        kind="governor action",
        summary=ACTIONS[name],
        source=Path(rules.__file__),
        usage=f'governor.rules = ["default", "{name} when …"]',
        facts=(("asked for by", ", ".join(asking)),) if asking else (),
        page=GOVERNOR_PAGE,
    )


def _rule(rule: Rule) -> Entry:
    return Entry(
        name=rule.name,
        kind="governor rule",
        summary=rule.text.partition(": ")[2],
        source=Path(governor.__file__),
        usage='governor.rules = ["default"]',
        page=GOVERNOR_PAGE,
    )


def _metrics_called(name: str) -> list[Entry]:
    """By its whole name, one of a family's, or what stands after the slash."""
    found = metrics.describe(name)
    ends = [metric for metric in metrics.METRICS if metric.name.rpartition("/")[2] == name]
    return [metric_entry(metric) for metric in ([found] if found else ends)]


def _usage(package: str, name: str) -> str:
    key = recipe_keys().get(package)
    return f'{key} = "{name}"' if key else ""


def _surrogate_facts(cls: Any) -> Iterator[tuple[str, str]]:
    it: Companions = cls.companions
    yield "usual advantage", it.advantage
    yield "usual correction", it.correction
    yield "usual reduction", it.reduction
    yield "dynamic sampling", "yes: groups whose rewards are all equal are replaced" if it.dynamic_sampling else "no"
    if it.prox_now:
        yield "proximal policy", "the learner as it is now (ℓp := sg ℓ), also for the correction's w"
    if it.one_update:
        yield "updates per step", "one"


def _advantage_facts(cls: Any) -> Iterator[tuple[str, str]]:
    batch = cls.scope == "batch"
    yield "computed from", "all groups of a step, which waits for the last" if batch else "one complete group"
    yield "value head", "needed" if cls.needs_values else "not needed"


def _correction_facts(cls: Any) -> Iterator[tuple[str, str]]:
    yield "in a list", "beside those that only reject" if cls.weighs else "only rejects: beside any other"


def _kl_facts(cls: Any) -> Iterator[tuple[str, str]]:
    yield "where", "loss or reward" if cls.in_loss else "reward only"


def _surrogate_refusals(name: str) -> Iterator[tuple[str, str]]:
    tried = {other: _refused(AlgorithmConfig, surrogate=name, correction=other) for other in choices(CORRECTIONS)}
    return _grouped(tried)


def _correction_refusals(name: str) -> Iterator[tuple[str, str]]:
    tried = {other: _refused(AlgorithmConfig, surrogate=other, correction=name) for other in choices(SURROGATES)}
    return _grouped(tried)


def _kl_refusals(name: str) -> Iterator[tuple[str, str]]:
    return _grouped({'where = "loss"': _refused(KLConfig, estimator=name, where="loss")})


def _refused(model: type[BaseModel], **keys: str) -> str | None:
    """Why the config refuses these choices together: asked of the validation itself, so that it cannot be wrong."""
    try:
        model.model_validate(keys)
    except ValidationError as error:
        return error.errors()[0]["msg"].removeprefix("Value error, ")
    return None


def _grouped(tried: dict[str, str | None]) -> Iterator[tuple[str, str]]:
    """One reason for all that are refused for the same reason: without the name of the one that was tried, if it has
    that and there are several."""
    groups: dict[str, list[str]] = {}
    for other, reason in tried.items():
        if reason:
            groups.setdefault(re.sub(rf" '?\b{other}\b'?", "", reason), []).append(other)
    for unnamed, others in groups.items():
        yield ", ".join(others), unnamed if len(others) > 1 else str(tried[others[0]])


_FACTS: dict[str, Callable[[Any], Iterator[tuple[str, str]]]] = {
    SURROGATES: _surrogate_facts,
    ADVANTAGES: _advantage_facts,
    CORRECTIONS: _correction_facts,
    ESTIMATORS: _kl_facts,
}
_REFUSALS: dict[str, Callable[[str], Iterator[tuple[str, str]]]] = {
    SURROGATES: _surrogate_refusals,
    CORRECTIONS: _correction_refusals,
    ESTIMATORS: _kl_refusals,
}
