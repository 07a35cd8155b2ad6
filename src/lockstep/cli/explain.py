"""`lockstep explain`: a method's equation, defaults, companions, paper and code, from the code itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from pathlib import Path
from textwrap import wrap

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from lockstep.cli.catalog import Entry, find, governing_entries, methods, routing_entries
from lockstep.metrics import METRICS

INDENT = 2


def explain(name: str | None, console: Console) -> None:
    if name is None:
        _list_all(console)
        return
    for entry in find(name):
        for block in _blocks(entry, console.width):
            console.print(block, highlight=False)


def _blocks(entry: Entry, width: int) -> Iterator[RenderableType]:
    yield Rule(Text.assemble((entry.name, "bold"), f" · {entry.kind}"), align="left", style="dim")
    yield Text(entry.summary)
    if entry.equation:
        yield _indented(Text("\n".join(entry.equation), style="cyan"), above=1)
    if entry.symbols:
        yield _indented(_pairs(entry.symbols.items(), style="dim"), above=1, indent=0)
    if entry.notes:
        yield _indented(Text(_unwrapped(entry.notes)), above=1, indent=0)
    if entry.text:
        yield _indented(
            Syntax(_narrow(entry.text, width - INDENT), "toml", background_color="default", word_wrap=True), above=1
        )
    if entry.options:
        yield _titled("Options")
        yield _options(entry)
    if entry.facts:
        yield _titled("Goes with" if entry.kind != "metric" else "Reading it")
        yield _pairs(entry.facts)
    if entry.refuses:
        yield _titled("Refuses")
        for names, reason in entry.refuses:
            yield _indented(Text.assemble((names, "bold"), f"\n{reason}"))
    yield _titled("Where")
    yield _pairs(_places(entry))
    yield ""


def _options(entry: Entry) -> RenderableType:
    grid = _grid(3)
    for option in entry.options:
        default, meaning = option.default.strip("`"), " ".join(option.meaning.split())
        grid.add_row(Text(option.name, style="bold"), Text(default, style="cyan"), Text(meaning))
    return _indented(grid)


def _places(entry: Entry) -> Iterator[tuple[str, str]]:
    if entry.usage:
        yield "recipe", entry.usage
    for link in entry.links:
        yield "paper", link
    if entry.page:
        yield "docs", entry.page
    yield "code", f"{_near(entry.source)}{f':{entry.line}' if entry.line else ''}"


def _list_all(console: Console) -> None:
    """Every name with what it is; metrics by name only, they are many."""
    for kind, entries in groupby(chain(methods(), routing_entries(), governing_entries()), lambda entry: entry.kind):
        console.print(_titled(f"{kind}s"), highlight=False)
        console.print(_pairs((entry.name, _in_short(entry.summary)) for entry in entries), highlight=False)
    console.print(_titled("metrics"), highlight=False)
    by_group = groupby(METRICS, lambda metric: metric.name.partition("/")[0])
    rows = ((f"{group}/", " ".join(m.name.partition("/")[2] for m in found)) for group, found in by_group)
    console.print(_pairs(rows), highlight=False)
    console.print("\n`lockstep explain NAME` tells more about one.", highlight=False)


def _pairs(rows: Iterable[Iterable[str]], style: str = "") -> RenderableType:
    grid = _grid(2)
    for name, text in rows:
        grid.add_row(Text(name, style=style or "bold"), Text(text, style=style, overflow="fold"))
    return _indented(grid)


def _grid(columns: int) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for column in range(columns):
        grid.add_column(no_wrap=column < columns - 1)
    return grid


def _titled(title: str) -> RenderableType:
    return Padding(Text(title, style="bold underline"), (1, 0, 0, 0), expand=False)


def _indented(block: RenderableType, above: int = 0, indent: int = INDENT) -> RenderableType:
    return Padding(block, (above, 0, 0, indent), expand=False)


def _unwrapped(text: str) -> str:
    """Paragraphs as one line each, for the terminal to wrap at its own width."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _in_short(summary: str) -> str:
    """Without the papers, which a list has no room for."""
    return re.sub(r" \([^()]*\)", "", summary)


def _narrow(text: str, width: int) -> str:
    """A preset with the source of a long line under it."""
    return "\n".join(part for line in text.strip().splitlines() for part in _under(line, width))


def _under(line: str, width: int) -> list[str]:
    setting, comment, source = line.partition("  # ")
    if len(line) <= width or not comment:
        return [line]
    return [setting, *wrap(source, max(width, 24), initial_indent="    # ", subsequent_indent="    # ")]


def _near(path: Path) -> Path:
    """As short as it can be opened from here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
