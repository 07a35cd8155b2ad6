"""Markdown that is the same on every generated page."""

from __future__ import annotations

import re
from collections.abc import Iterable

from lockstep.cli.introspection import Key


def rows(first: str, keys: Iterable[Key]) -> str:
    lines = [f"| `{key.name}` | {key.type} | {key.default} | {sentence(key.meaning)} |" for key in keys]
    return "\n".join([f"| {first} | Type | Default | Meaning |", "|---|---|---|---|", *lines, ""])


def sentence(text: str) -> str:
    """With a capital and without a full stop, whichever way its author wrote it; a symbol stays as it is."""
    line = escape(text).rstrip(".")
    return line[:1].upper() + line[1:] if re.match(r"[a-z]{2,}\b", line) else line


def cited(text: str) -> str:
    """With its papers as links."""
    text = re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
    return re.sub(r"OpenReview (\w{8,})", r"[OpenReview \1](https://openreview.net/forum?id=\1)", text)


def escape(text: str) -> str:
    """As one cell of a table."""
    return text.replace("|", "\\|").replace("<", "\\<").replace("\n", " ")
