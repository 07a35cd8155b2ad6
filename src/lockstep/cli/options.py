"""What commands of several groups share."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

console = Console()
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[a.b=c]...", help="keys of the recipe, set to other values")
]


def bytes_text(num: float) -> str:
    """In the unit that leaves one to three digits before the point: 413 KiB, 1.62 MiB, 15.3 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if num < 1000:
            return f"{num:.3g} {unit}"
        num /= 1024
    return f"{num:.3g} GiB" if num < 1000 else f"{num:,.0f} GiB"
