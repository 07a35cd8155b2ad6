"""What commands of several groups share."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

console = Console()
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[a.b=c]...", help="keys of the recipe, set to other values")
]
