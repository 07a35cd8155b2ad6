"""What commands of several groups share."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console

from lockstep.config import ConfigError

console = Console()
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[a.b=c]...", help="keys of the recipe, set to other values")
]


def require_writable(*files: Path | None) -> None:
    """ConfigError, before anything is computed, for a file that could not be written when it is."""
    for file in filter(None, files):
        new = not os.path.lexists(file)
        try:
            file.open("ab").close()
        except OSError as error:
            why = error.strerror if os.path.lexists(file.parent) else f"there is no folder {file.parent}"
            raise ConfigError(f"cannot write {file}: {why}") from None
        if new:
            file.unlink()


def require_folder(folder: Path) -> None:
    """ConfigError for what is no folder to write into, and cannot be made one."""
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        TemporaryDirectory(dir=there).cleanup()
    except OSError as error:
        raise ConfigError(f"cannot write into the folder {folder}: {error.strerror}") from None


def bytes_text(num: float) -> str:
    """In the unit that leaves one to three digits before the point: 413 KiB, 1.62 MiB, 15.3 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if num < 1000:
            return f"{num:.3g} {unit}"
        num /= 1024
    return f"{num:.3g} GiB" if num < 1000 else f"{num:,.0f} GiB"
