"""Markdown that is the same on every generated page."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.cli.introspection import Key


def rows(first: str, keys: Iterable[Key]) -> str:
    lines = [f"| `{key.name}` | {key.type} | {key.default} | {sentence(key.meaning)} |" for key in keys]
    return "\n".join([f"| {first} | Type | Default | Meaning |", "|---|---|---|---|", *lines, ""])


def sentence(text: str) -> str:
    """With a capital and without a full stop, whichever way its author wrote it."""
    line = escape(text).rstrip(".")
    return line[:1].upper() + line[1:]


def escape(text: str) -> str:
    """As one cell of a table."""
    return text.replace("|", "\\|").replace("<", "\\<").replace("\n", " ")
