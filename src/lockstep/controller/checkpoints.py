"""Checkpoint folders: written aside, then renamed, so that a folder that exists is whole.

`checkpoints/step-000040/` holds the Hugging Face model, the learner's state and `progress.json`; `checkpoints/best` is a
link to the one with the best evaluation.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands between two steps; with the learner's state, all a resumed run needs."""

    step: int  # steps done
    version: int
    next_index: int  # first prompt index never admitted
    unfinished: list[int]  # admitted and not trained: generated again
    best: float | None = None  # best eval/accuracy so far
    train_seconds: float = 0.0  # spent in the loop, over all resumes


@dataclass(slots=True)
class Checkpoints:
    folder: Path
    keep: int

    async def save(self, progress: Progress, write: Callable[[Path], Awaitable[None]], *, best: bool) -> Path:
        """`write` fills a folder; only when everything is on disk does it get its name. Raises OSError, harming nothing."""
        target = self.folder / f"step-{progress.step:06d}"
        aside = self.folder / f".writing-{progress.step:06d}"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir(parents=True)
            await write(aside)
            (aside / "progress.json").write_text(json.dumps(asdict(progress)))
            _sync(aside)
            if target.exists():  # the same step again: a stop right after a scheduled save
                shutil.rmtree(target)
            aside.rename(target)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        if best:
            self._mark_best(target)
        self._prune()
        return target

    def latest(self) -> tuple[Path, Progress] | None:
        """The newest whole checkpoint."""
        found = self._all()
        if not found:
            return None
        return found[-1], Progress(**json.loads((found[-1] / "progress.json").read_text()))

    def best(self) -> Path | None:
        link = self.folder / "best"
        return link.resolve() if link.exists() else None

    def _all(self) -> list[Path]:
        return sorted(p for p in self.folder.glob("step-*") if (p / "progress.json").is_file())

    def _mark_best(self, target: Path) -> None:
        link, fresh = self.folder / "best", self.folder / ".best"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(target.name)
        fresh.replace(link)

    def _prune(self) -> None:
        best = self.best()
        for old in self._all()[: -self.keep]:
            if old.resolve() != best:
                shutil.rmtree(old)


def _sync(folder: Path) -> None:
    """Forces a folder's files to disk: a rename must not become visible before what it names."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
