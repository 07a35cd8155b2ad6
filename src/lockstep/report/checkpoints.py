"""The checkpoints of a run: each appears whole or not at all, the last few and the best are kept."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """`root/step-000040/` for every kept step, and the link `root/best` to one of them."""

    root: Path

    def path(self, step: int) -> Path:
        return self.root / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Complete checkpoints, oldest first."""
        if not self.root.is_dir():
            return []
        return sorted(int(match[1]) for child in self.root.iterdir() if (match := _NAME.fullmatch(child.name)))

    @property
    def latest(self) -> int | None:
        steps = self.steps()
        return steps[-1] if steps else None

    @property
    def best(self) -> int | None:
        link = self.root / "best"
        match = _NAME.fullmatch(os.readlink(link)) if link.is_symlink() else None
        return int(match[1]) if match else None

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """A folder to fill. It takes its name when the block ends; if the block raises, nothing is left of it."""
        target = self.path(step)
        if target.exists():
            raise FileExistsError(f"{target} exists: a step is saved once")
        partial = self.root / f".{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            yield partial
            _flush(partial)
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def mark_best(self, step: int) -> None:
        link = self.root / ".best.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(self.path(step).name)
        link.replace(self.root / "best")

    def prune(self, keep: int) -> list[int]:
        """Removes all but the `keep` newest and the best; returns the steps that went."""
        steps = self.steps()
        gone = [step for step in steps[: max(len(steps) - keep, 0)] if step != self.best]
        for step in gone:
            hidden = self.root / f".{self.path(step).name}.removed"
            self.path(step).rename(hidden)  # never visible half deleted
            shutil.rmtree(hidden)
        return gone

    def sweep(self) -> None:
        """Removes what a killed process left half written or half deleted. Only for the run's one writer."""
        for leftover in self.root.glob(".step-*"):
            shutil.rmtree(leftover)


def _flush(folder: Path) -> None:
    """To the disk before the rename, so that a power cut cannot leave a named but empty checkpoint."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
