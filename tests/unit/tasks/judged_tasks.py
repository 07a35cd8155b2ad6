"""Tasks whose rewards misbehave, chosen as a user's own: `judged_tasks.py:Naps`."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.tasks import DatasetTask
from lockstep.types import Sample, Verdict


@dataclass(frozen=True, kw_only=True)
class Misbehaves(DatasetTask):
    """Does what the answer says."""

    path: str = "unused.jsonl"

    def reward(self, sample: Sample, answer: str) -> Any:
        action, _, argument = answer.partition(" ")
        return getattr(self, action)(argument)

    def length(self, text: str) -> Verdict:
        return Verdict(value=float(len(text)), parts={"length": len(text)}, reasons=("length: counted",))

    def pid(self, _: str) -> int:
        return os.getpid()

    def modules(self, name: str) -> bool:
        return name in sys.modules

    def nap(self, seconds: str) -> float:
        time.sleep(float(seconds))
        return 1.0

    def spin(self, _: str) -> int:
        """Inside C, holding the interpreter's lock: no thread of this process ever runs again."""
        return 9 ** (9**9)

    def spawn(self, note: str) -> float:
        """Starts a process and hangs with it."""
        child = subprocess.Popen(["sleep", "600"])
        Path(note).write_text(str(child.pid))
        return child.wait()

    def fork(self, text: str) -> float:
        """The other process falls through to what this one does."""
        os.fork()
        return float(len(text))

    def die(self, _: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self, _: str) -> None:
        sys.exit(3)

    def shout(self, text: str) -> float:
        print(text)
        return 1.0

    def fail(self, why: str) -> float:
        raise KeyError(why)

    def say(self, value: str) -> Any:
        return {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0", "true": True}[value]


@dataclass(frozen=True, kw_only=True)
class CannotBuild(Misbehaves):
    here: int = os.getpid()

    def __post_init__(self) -> None:
        if os.getpid() != int(os.environ["LOCKSTEP_TEST_PARENT"]):
            raise ValueError("no licence in this process")
