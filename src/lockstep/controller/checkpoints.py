"""Checkpoint folders: written aside, then renamed, so that a folder that exists is whole.

`checkpoints/step-000040/` holds the Hugging Face model, the learner's state and `progress.json`; `checkpoints/best` is
a link to the one with the best evaluation.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from lockstep.config import ConfigError

NAME = re.compile(r"step-(\d{6,})")
ASIDE = ".aside-"  # prefix of folders that are being written or deleted


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands between two steps; with the learner's state, all a resumed run needs."""

    step: int  # steps done
    version: int
    next_index: int  # first prompt index never admitted
    unfinished: list[int]  # admitted and not trained: generated again
    best: float | None = None  # best eval/accuracy so far
    train_seconds: float = 0.0  # spent in the loop, over all resumes
    governor: dict[str, Any] = field(default_factory=dict)  # what its rules have seen and changed


@dataclass(slots=True)
class Checkpoints:
    """For the one process that writes a run; anyone may read what is there meanwhile."""

    folder: Path
    keep: int

    async def save(self, progress: Progress, write: Callable[[Path], Awaitable[None]], *, best: bool) -> Path:
        """`write` fills a folder, which gets its name when everything is on disk. Raises OSError, harming nothing.

        A step that is there already is not written again: a resumed run stands where the checkpoint stands.
        """
        target = self.folder / f"step-{progress.step:06d}"
        self.sweep()
        if not target.exists():
            await self._write(target, progress, write)
        if best:
            self._mark_best(target)
        self._prune()
        return target

    def latest(self) -> tuple[Path, Progress] | None:
        """The newest whole checkpoint."""
        found = self._all()
        return (found[-1], read_progress(found[-1])) if found else None

    def best(self) -> Path | None:
        link = self.folder / "best"
        return link.resolve() if link.exists() else None

    def sweep(self) -> None:
        """Removes what a killed process left half written or half deleted."""
        for leftover in self.folder.glob(f"{ASIDE}*"):
            shutil.rmtree(leftover)

    async def _write(self, target: Path, progress: Progress, write: Callable[[Path], Awaitable[None]]) -> None:
        aside = self.folder / f"{ASIDE}{target.name}"
        aside.mkdir(parents=True)
        try:
            await write(aside)
            (aside / "progress.json").write_text(json.dumps(asdict(progress)))
            force_to_disk([*aside.rglob("*"), aside])
            aside.rename(target)
            force_to_disk([self.folder])
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise

    def _all(self) -> list[Path]:
        """Whole checkpoints, oldest first; numbers, not names, because names grow longer after a million steps."""
        found = {int(match[1]): path for path in self.folder.glob("step-*") if (match := NAME.fullmatch(path.name))}
        return [found[step] for step in sorted(found)]

    def _mark_best(self, target: Path) -> None:
        fresh = self.folder / ".best"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(target.name)
        fresh.replace(self.folder / "best")

    def _prune(self) -> None:
        best = self.best()
        for old in self._all()[: -self.keep]:
            if old.resolve() != best:
                aside = old.rename(self.folder / f"{ASIDE}{old.name}")  # never visible half deleted
                shutil.rmtree(aside)


def read_progress(checkpoint: Path) -> Progress:
    """Where the run stood when it wrote this checkpoint."""
    path = checkpoint / "progress.json"
    try:
        Progress(**json.loads(path.read_text()))  # all of its keys, and no others
        return TypeAdapter(Progress).validate_json(path.read_bytes(), strict=True)
    except (OSError, ValueError, TypeError) as error:
        what = "is missing" if isinstance(error, FileNotFoundError) else "is damaged"
        raise ConfigError(f"{path} {what}; remove that checkpoint to go on from the one before") from error


def force_to_disk(paths: Iterable[Path]) -> None:
    """Files and folders: a rename must not become visible before what it names."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
