"""Where a run lives on disk, so that writers, readers and a resumed run agree on it.

runs/NAME/config.json          the resolved config
          environment.json     versions, commit, device, command line
          metrics.jsonl        {"step": 3, "time": 12.5, "wall": 1700000000.0, "reward/mean": 0.4, ...}
          samples.jsonl        one answer a line: prompt, text, reward, parts, reasons, stop reason, length
          events.jsonl         {"step": 40, "time": 80.1, "wall": ..., "kind": "checkpoint", "text": "..."}
          checkpoints/step-000040/, checkpoints/best
          reference/           the model before the first step, where a KL term holds the policy to it
          plots/*.png, report.html, tensorboard/
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config import ConfigError
from lockstep.config.paths import given_path
from lockstep.report.jsonl import Row, keep_rows, read, write_atomically

_CLOCK = frozenset({"step", "time", "wall"})


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of one run. Make one with `create` or `open`."""

    root: Path
    others: frozenset[str] | None = None  # of one just made: what somebody had put there before; None: it is new

    @classmethod
    def create(cls, root: Path) -> RunFolder:
        """A new run; ConfigError if a run is already there, so that no history is ever written over."""
        try:
            with given_path(f"cannot make a run in {root}"):
                there = root.is_dir()
                root.mkdir(parents=True, exist_ok=True)
                folder = cls(root, frozenset(path.name for path in root.iterdir()) if there else None)
                folder.metrics.touch(exist_ok=False)
        except FileExistsError:
            what = "already holds a run" if root.is_dir() else "is a file"
            raise ConfigError(f"{root} {what}: continue it with --resume {root} or choose another name") from None
        return folder

    @classmethod
    def open(cls, root: Path) -> RunFolder:
        folder = cls(root)
        with given_path(f"cannot read {root}"):
            if not folder.metrics.is_file():
                what = "holds no run (no metrics.jsonl)" if root.is_dir() else "is not a folder"
                raise ConfigError(f"{root} {what}; a run is a folder such as runs/quickstart")
        return folder

    def remove(self) -> None:
        """All that a run which never began has left, and nothing of somebody else's."""
        with suppress(OSError):  # what is wrong with the run matters more
            for path in self.root.iterdir():
                if path.name not in (self.others or ()):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            if self.others is None:
                self.root.rmdir()

    @property
    def name(self) -> str:
        return self.root.resolve().name

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def environment(self) -> Path:
        return self.root / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.root / "samples.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def result(self) -> Path | None:
        """The best checkpoint, or the newest where none was evaluated; None before the first."""
        best = self.checkpoints / "best"
        return best if best.exists() else max(self.checkpoints.glob("step-*"), key=_by_number, default=None)

    @property
    def plots(self) -> Path:
        return self.root / "plots"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One writer at a time: a second process that wants to go on with the same run is refused."""
        with (self.root / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another process is running in {self.root}") from None
            yield

    def write_config(self, config: Mapping[str, Any]) -> None:
        """`config` is what resuming needs, JSON-ready: a model's `model_dump(mode="json")` or the merged tables."""
        write_atomically(self.config, _pretty(config))

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """What `lockstep.report.environment` gathered. A resumed run keeps its id and when it was created."""
        before = self.read_environment()
        kept = {key: before[key] for key in ("id", "created") if key in before}
        write_atomically(self.environment, _pretty({**environment, **kept}))

    def read_config(self) -> dict[str, Any]:
        return _read_json(self.config)

    def read_environment(self) -> dict[str, Any]:
        return _read_json(self.environment)

    def read_metrics(self) -> Iterator[Row]:
        return _steps(self.metrics)

    def read_samples(self) -> Iterator[Row]:
        return _steps(self.samples)

    def read_events(self) -> Iterator[Row]:
        return _steps(self.events)

    def rewind(self, step: int) -> None:
        """Forgets what was logged after `step`, the checkpoint the run goes on from: those steps run again.

        The warm-up counts its own steps and comes before step 0, so its rows stay. `rewind(-1)` forgets
        everything, for a run that stopped before its first checkpoint.
        """
        for path in (self.metrics, self.samples, self.events):
            for _ in _steps(path):  # nothing is written before all of it was read
                pass
        keep_rows(self.metrics, lambda row: row["step"] <= step or (step >= 0 and is_warmup(row)))
        keep_rows(self.samples, lambda row: row["step"] <= step)
        keep_rows(self.events, lambda row: row["step"] <= step)

    @property
    def ever_saved(self) -> bool:
        """Whether a checkpoint was written, be it there or not."""
        return any("time/save" in row for row in self.read_metrics())


def _steps(path: Path) -> Iterator[Row]:
    """The rows of a log, each of which says its step."""
    for number, row in enumerate(read(path), 1):
        if not isinstance(row.get("step"), int):
            raise ConfigError(f"{path} is damaged: line {number} has no step")
        yield row


def _by_number(checkpoint: Path) -> tuple[int, str]:
    """Names grow longer after a million steps."""
    return len(checkpoint.name), checkpoint.name


def is_warmup(row: Row) -> bool:
    """Whether it was logged by the warm-up, which counts its own steps."""
    names = row.keys() - _CLOCK
    return bool(names) and all(name.startswith("warmup/") for name in names)


def _pretty(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _read_json(path: Path) -> dict[str, Any]:
    """Empty if the run was killed before it was written."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is damaged: it holds no object")
    return found
