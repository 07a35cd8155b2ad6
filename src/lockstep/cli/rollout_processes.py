"""An engine of `lockstep bench rollout` in a process of its own, and what that process tells while it runs.

Whatever the process starts (vLLM runs its engine in another one) is in its process group, and ends with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from threading import Timer, current_thread, main_thread
from typing import IO, Any, NoReturn

import lockstep
from lockstep.config import ConfigError

TIMEOUT = 1200.0  # seconds for one engine
PROGRESS, RESULT, REFUSED = "PROGRESS ", "RESULT ", "REFUSED "  # how lines begin by which a process reports
LOG_LINES = 40  # of a process that failed are shown
ENDING = (signal.SIGTERM, signal.SIGHUP)


class EngineError(Exception):
    """With the end of what it wrote."""


def tell(kind: str, what: Any) -> None:
    """From within the process."""
    print(kind + json.dumps(what), flush=True)


def told_by(engine: str, command: Sequence[str], threads: int | None) -> Generator[tuple[str, Any], None, None]:
    """Progress and results, as they come. ConfigError with what the process refuses, EngineError if it fails."""
    lines: list[str] = []
    has_told = False
    with TemporaryFile("w+") as log, _started(command, threads, log) as process:
        for line in process.stdout or ():
            kind = next((kind for kind in (PROGRESS, RESULT, REFUSED) if line.startswith(kind)), None)
            if kind is None:
                lines.append(line)
                continue
            what = json.loads(line.removeprefix(kind))
            if kind == REFUSED:
                raise ConfigError(what)
            has_told = True
            yield kind, what
        if process.wait() or not has_told:
            log.seek(0)
            tail = "".join([*lines, *log.readlines()][-LOG_LINES:]).strip()
            raise EngineError(f"{engine} failed (exit code {process.returncode}):\n{tail}")


@contextmanager
def _started(command: Sequence[str], threads: int | None, log: IO[str]) -> Iterator[subprocess.Popen[str]]:
    paths = [str(Path(lockstep.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}  # another interpreter finds us too
    if threads is not None:  # vLLM takes them as they are only if it does not bind them itself
        environment |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, process_group=0)
    killer = Timer(TIMEOUT, _kill, [process])
    killer.start()
    try:
        with process:
            try:
                yield process
            finally:
                _kill(process)
    finally:
        killer.cancel()


def _kill(process: subprocess.Popen[str]) -> None:
    """With everything it started, which would hold its pipe open."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def has_module(python: str, name: str) -> bool:
    """Whether an interpreter finds it. False too for what is no interpreter, or does not answer."""
    question = f"from importlib.util import find_spec; print(find_spec({name!r}) is not None)"
    try:
        done = subprocess.run([python, "-c", question], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout.strip() == "True"


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM, or a terminal that closes, ends what runs in here as Ctrl-C does: nothing is left behind."""
    if current_thread() is not main_thread():
        yield
        return
    before = {number: signal.signal(number, _end) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: Any) -> NoReturn:
    sys.exit(128 + number)
