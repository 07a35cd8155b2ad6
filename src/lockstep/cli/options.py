"""What commands of several groups share."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import NamedTemporaryFile, mkdtemp
from typing import Annotated

import typer
from rich.console import Console

from lockstep.config import ConfigError
from lockstep.config.paths import given_path

console = Console()
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[a.b=c]...", help="keys of the recipe, set to other values")
]


def require_writable(*files: Path | None) -> None:
    """ConfigError, before anything is computed, for a file that could not be written when it is."""
    given = [*filter(None, files)]
    if len({os.path.realpath(file) for file in given}) < len(given):
        raise ConfigError(f"{given[0]} is named twice: it can hold one thing only")
    for file in given:
        with given_path(f"cannot write {file}"):
            _require_parent(file)
            new = not file.exists()
            file.open("ab").close()
            if new:
                file.resolve().unlink()  # of a link to nothing, what it points to


def require_replaceable(file: Path) -> None:
    """The same for a file that is written beside its place and then moved there: what it holds now may be read-only."""
    with given_path(f"cannot write {file}"):
        _require_parent(file)
        if file.exists() and not file.is_file():
            what = "Is a directory" if file.is_dir() else "Is not a regular file"
            raise ConfigError(f"cannot write {file}: {what}")
        NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.", suffix=".tmp").close()


def require_folder(folder: Path) -> None:
    """ConfigError for what is no folder to write into, and cannot be made one."""
    with given_path(f"cannot write into the folder {folder}"):
        there = next(path for path in (folder, *folder.parents) if _is_there(path))
        os.rmdir(mkdtemp(dir=there))


def require_folder_of_its_own(folder: Path) -> None:
    """The same; and ConfigError for a run or one of its checkpoints, which others would take for the run's."""
    require_folder(folder)
    for root in (folder, folder.parent.parent if folder.parent.name == "checkpoints" else folder):
        if (root / "metrics.jsonl").is_file():
            raise ConfigError(f"cannot write into {folder}: that is the run {root}")


def _require_parent(file: Path) -> None:
    if not _is_there(file.parent):
        raise ConfigError(f"cannot write {file}: there is no folder {file.parent}")


def _is_there(path: Path) -> bool:
    """Also a link to nothing; OSError for what can never be there, such as a name that is too long."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def bytes_text(num: float) -> str:
    """In the unit that leaves one to three digits before the point: 413 KiB, 1.62 MiB, 15.3 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if num < 1000:
            return f"{num:.3g} {unit}"
        num /= 1024
    return f"{num:.3g} GiB" if num < 1000 else f"{num:,.0f} GiB"
