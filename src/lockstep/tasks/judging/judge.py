"""Judging answers with any task's reward, without letting it block, hang or end the run.

Who runs where: a task that declares `fast = True` promises a reward of a few string operations that cannot hang; it
is called in place. Every other reward, a user's own above all, runs in worker processes with a time limit. A worker
that exceeds it is killed with everything it started, and replaced when the next answer needs it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import Pipe

from pydantic import Field

from lockstep.config import Config
from lockstep.protocols import Task
from lockstep.tasks.judging.verdicts import failed, judged
from lockstep.types import Sample, Verdict

_END_LIMIT_S = 1.0  # for a worker whose pipe is closed
_START_LIMIT_S = 120.0  # a busy machine may take long to import a task's libraries


class JudgeConfig(Config):
    time_limit: float = Field(default=10.0, gt=0)
    """Seconds a reward may take for one answer; beyond, the answer counts as failed and does not train."""
    workers: int = Field(default=2, ge=1)
    """Processes that judge answers, for rewards that are not instant."""


class Judge:
    """Awaitable rewards of one task.

    `build` makes the task here and, pickled, in the workers: a recipe's `plugin.build`, or an importable class.
    Workers start with the first answer that needs one.
    """

    def __init__(self, build: Callable[[], Task], *, time_limit: float = 10.0, workers: int = 2) -> None:
        self._build = build
        self._task = build()
        self._fast: bool = getattr(self._task, "fast", False)  # optional for tasks that users write
        self._time_limit = time_limit
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="judge")  # each waits for one worker at a time
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        self._closed = False

    async def __call__(self, sample: Sample, answer: str) -> Verdict:
        """Waits for a free worker, then for the reward; unblocked by the verdict, the time limit or the worker's death.

        Raises RuntimeError only if a worker cannot build the task at all, or after `close`.
        """
        if self._fast:
            return judged(self._task.reward, sample, answer)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._in_worker, sample, answer)

    async def close(self) -> None:
        """Kills the workers; answers that still wait come back as failed."""
        with self._lock:
            self._closed = True
            workers = tuple(self._workers)
        for worker in workers:
            worker.kill()
        await asyncio.to_thread(self._threads.shutdown)

    def _in_worker(self, sample: Sample, answer: str) -> Verdict:
        try:
            with self._borrow() as worker:
                return worker.judge(sample, answer, self._time_limit)
        except RuntimeError as error:
            if not self._closed:
                raise error
            return failed("the judge was closed")

    @contextmanager
    def _borrow(self) -> Iterator[_Worker]:
        worker = self._take()
        try:
            yield worker
        finally:
            self._put_back(worker)

    def _take(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise RuntimeError("the judge is closed")
            while self._idle:
                worker = self._idle.pop()
                if worker.alive:
                    return worker
                self._workers.discard(worker)
            worker = _Worker(self._build)
            self._workers.add(worker)
        return worker

    def _put_back(self, worker: _Worker) -> None:
        with self._lock:
            if worker.alive:
                self._idle.append(worker)
            else:
                self._workers.discard(worker)


class _Worker:
    """This side of one worker process. A fresh interpreter rather than a fork: the parent has threads and CUDA."""

    def __init__(self, build: Callable[[], Task]) -> None:
        self._build = build
        self._ready = False
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lockstep.tasks.judging.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # finds what we find
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward prints is a message, not part of our output
                start_new_session=True,  # Ctrl-C is ours to handle, and what it started can be killed with it
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def judge(self, sample: Sample, answer: str, time_limit: float) -> Verdict:
        self._wait_ready()
        try:
            self._pipe.send((sample, answer, time_limit))
            if self._pipe.poll(time_limit):
                return self._pipe.recv()
        except (EOFError, ConnectionError):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_LIMIT_S)  # by itself, so that the status is its own
            self.kill()
            return failed(f"the reward's process ended with status {self._process.returncode}")
        self.kill()
        return failed(f"the reward took longer than {time_limit:g} s")

    def kill(self) -> None:
        if self._process.returncode is None:  # not waited for yet, so the number is still its own
            with suppress(ProcessLookupError, PermissionError):  # it ended by itself
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _wait_ready(self) -> None:
        if self._ready:
            return
        try:
            self._pipe.send(self._build)
            problem = self._pipe.recv() if self._pipe.poll(_START_LIMIT_S) else f"not ready after {_START_LIMIT_S:g} s"
        except (EOFError, ConnectionError):
            problem = f"ended with status {self._process.wait()}"
        if problem is not None:
            self.kill()
            raise RuntimeError(f"a worker could not build the task to judge with it: {problem}")
        self._ready = True
