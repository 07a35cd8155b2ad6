"""Two programs measured side by side: each in a process of its own, one step at a time, in turns.

The machine may be shared and its speed may drift. Taking turns lets the drift hit both sides alike, and a process that
waits for its turn uses no CPU. Start-up and warm-up steps are not counted.
"""

from __future__ import annotations

import multiprocessing
import platform
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.config import ConfigError

GO = "go"
_END_LIMIT_S = 20.0  # to clean up after the last step


@dataclass(frozen=True, slots=True)
class Step:
    seconds: float
    cpu_seconds: float  # of all threads of the process: what a busy machine changes less
    samples: int  # answers sampled and learned from
    tokens: int  # sampled tokens in them


@dataclass(slots=True)
class Measured:
    """What one side did."""

    name: str
    steps: list[Step] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of a step, the median."""
        return median(step.seconds for step in self.steps)

    @property
    def cpu_seconds(self) -> float:
        return median(step.cpu_seconds for step in self.steps)

    @property
    def samples_per_s(self) -> float:
        return median(step.samples / step.seconds for step in self.steps)

    @property
    def tokens_per_s(self) -> float:
        return median(step.tokens / step.seconds for step in self.steps)

    @property
    def length(self) -> float:
        """Mean sampled tokens per answer."""
        return sum(step.tokens for step in self.steps) / sum(step.samples for step in self.steps)

    def summary(self) -> dict[str, Any]:
        return {
            "samples_per_s": self.samples_per_s,
            "tokens_per_s": self.tokens_per_s,
            "length": self.length,
            "step_seconds": [step.seconds for step in self.steps],
            "step_cpu_seconds": [step.cpu_seconds for step in self.steps],
        }


class Turn:
    """A side's view of the taking of turns. It calls `end_step` after each step, and waits in it for its next turn."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._samples = self._tokens = 0

    def begin(self) -> None:
        """Everything is loaded. Waits for the first turn."""
        self._pipe.send(None)
        self._wait()

    def count(self, samples: int, tokens: int) -> None:
        self._samples += samples
        self._tokens += tokens

    def end_step(self) -> None:
        seconds, cpu_seconds = time.perf_counter() - self._started, time.process_time() - self._cpu_started
        self._pipe.send(Step(seconds, cpu_seconds, self._samples, self._tokens))
        self._samples = self._tokens = 0
        self._wait()

    def _wait(self) -> None:
        """After the last step, the word to go on lets the side end."""
        self._pipe.recv()
        self._started, self._cpu_started = time.perf_counter(), time.process_time()


Side = Callable[..., None]  # (turn, *arguments): runs in a fresh interpreter, so it must be importable


@dataclass(frozen=True, slots=True)
class Runner:
    """The other end of a Turn."""

    name: str
    pipe: Connection

    def step(self) -> Step:
        self.pipe.send(GO)
        return self.receive()

    def receive(self) -> Any:
        try:
            message = self.pipe.recv()
        except EOFError:
            raise RuntimeError(f"the process of {self.name} ended early") from None
        if isinstance(message, str):
            raise RuntimeError(f"{self.name} failed:\n{message}")
        return message


@contextmanager
def started(name: str, side: Side, *arguments: object) -> Iterator[Runner]:
    """A side that has loaded and waits for its first turn. Leaving the block lets it finish, or ends it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_side, args=(theirs, side, arguments), daemon=True)
    process.start()
    theirs.close()
    runner = Runner(name, ours)
    try:
        runner.receive()
        yield runner
        ours.send(GO)
        process.join(_END_LIMIT_S)
    finally:
        ours.close()
        process.terminate()
        process.join()


def _run_side(pipe: Connection, side: Side, arguments: Sequence[object]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its sides
    try:
        side(Turn(pipe), *arguments)
    except BaseException:
        with suppress(OSError):  # the parent is gone
            pipe.send(traceback.format_exc())


def take_turns(
    sides: Sequence[tuple[str, Side, tuple[object, ...]]],
    *,
    steps: int,
    warmup: int,
    on_step: Callable[[int, Sequence[Measured]], None],
) -> list[Measured]:
    """Measures `steps` steps of each side after `warmup` that do not count; `on_step` sees every round's result."""
    measured = [Measured(name) for name, _, _ in sides]
    with ExitStack() as stack:
        runners = [stack.enter_context(started(name, side, *arguments)) for name, side, arguments in sides]
        for number in range(1, warmup + steps + 1):
            for runner, result in zip(runners, measured, strict=True):
                step = runner.step()
                if number > warmup:
                    result.steps.append(step)
            on_step(number, measured)
    return measured


def processor() -> str:
    """Its name where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def marks(name: str) -> tuple[str, str]:
    """What a page has around the figures that a command writes into it."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def require_page(page: Path | None) -> None:
    """ConfigError, before anything is measured, for what `write_into` could not write into when it is."""
    if page is None or not page.is_file():
        return
    try:
        text = page.read_text("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{page} is not a text in UTF-8") from None
    for name in re.findall(r"<!-- (.+): begin -->", text):
        begin, end = marks(name)
        if end not in text.partition(begin)[2]:
            raise ConfigError(f"{page} has the mark {begin} without {end} after it")


def write_into(page: Path, text: str, name: str = "measured") -> None:
    """Between the marks of that name; at the end of a page that has none. Whatever else is there stays."""
    begin, end = marks(name)
    require_page(page)
    old = page.read_text("utf-8") if page.exists() else ""
    before, found, rest = old.partition(begin)
    if not found and old.strip():
        before = old.rstrip() + "\n\n"
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2] if found else chr(10)}")
