"""The embedded engine as a role: the core runs in a thread of its own, callers await."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TypeVar

from lockstep.protocols import WeightStore
from lockstep.rollout.config import UpdatePolicy
from lockstep.rollout.core import EngineCore
from lockstep.types import Completion, Request

Result = TypeVar("Result")


class Embedded:
    """Implements protocols.Engine.

    Requests made in the same turn of the event loop reach the scheduler together, so a batch submitted at once is
    composed the same way in every run. `store` is None when the engine shares the learner's memory: then new weights
    are already in place, and an update is allowed only while nothing runs.
    """

    def __init__(self, core: EngineCore, *, store: WeightStore | None, update: UpdatePolicy = "keep_kv") -> None:
        self._core = core
        self._store = store
        self._policy: UpdatePolicy = update
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outboxes: dict[str, Callable[[Completion | BaseException], None]] = {}
        self._staged: list[Request] = []
        self._drained: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._busy_seconds = 0.0
        self._stats: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        """consumes: requests · waits for: the engine's thread · unblocked by: completions, or the thread's failure"""
        self._raise_if_dead()
        for request in requests:
            self._core.check(request)
            if request.uid in self._outboxes:
                raise ValueError(f"request {request.uid!r} is already running")
        loop = asyncio.get_running_loop()
        results: asyncio.Queue[Completion | BaseException] = asyncio.Queue()
        pending = {r.uid for r in requests}
        for uid in pending:
            self._outboxes[uid] = lambda item: loop.call_soon_threadsafe(results.put_nowait, item)
        if not self._staged:
            loop.call_soon(self._flush)
        self._staged.extend(requests)
        try:
            while pending:
                item = await results.get()
                if isinstance(item, BaseException):
                    raise RuntimeError(f"the engine failed: {item}") from item
                pending.discard(item.uid)
                yield item
        finally:
            if pending:
                self._abandon(pending)

    async def abort(self, uids: Sequence[str]) -> None:
        await self._call(lambda: self._deliver(self._core.abort(set(uids))))

    async def update_weights(self, version: int) -> None:
        """consumes: one version of the store · waits for: the step under way, or with `drain` the running answers"""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        loop = done.get_loop()

        def finish(error: BaseException | None = None) -> None:
            outcome = (lambda: done.set_exception(error)) if error else (lambda: done.set_result(None))
            loop.call_soon_threadsafe(lambda: None if done.done() else outcome())

        def apply() -> None:
            try:
                self._apply_update(version)
                finish()
            except Exception as error:
                finish(error)

        def start() -> None:
            if self._policy == "drain" and self._core.scheduler.running:
                self._core.scheduler.admitting = False
                self._drained = apply
            else:
                apply()

        self._raise_if_dead()
        self._inbox.put(start)
        await done

    async def reset_cache(self) -> None:
        await self._call(self._core.scheduler.pool.reset)

    async def stats(self) -> Mapping[str, float]:
        now = asdict(self._core.scheduler.counters) | {"busy_seconds": self._busy_seconds}
        since = {name: value - self._stats.get(name, 0) for name, value in now.items()}
        self._stats = now
        return since

    async def close(self) -> None:
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, 60)

    def _flush(self) -> None:
        staged, self._staged = self._staged, []
        self._inbox.put(lambda: self._core.add(staged))

    def _abandon(self, uids: set[str]) -> None:
        for uid in uids:
            self._outboxes.pop(uid, None)
        self._staged = [r for r in self._staged if r.uid not in uids]
        self._inbox.put(lambda: self._deliver(self._core.abort(uids)))

    def _apply_update(self, version: int) -> None:
        scheduler = self._core.scheduler
        if self._store is None:
            assert not scheduler.running, "weights are shared with the learner: they may not change while answers run"
        else:
            self._core.load_weights(self._store.get(version))
        scheduler.new_version(version, recompute=self._policy == "reprefill")
        scheduler.admitting = True

    async def _call(self, action: Callable[[], Result]) -> Result:
        """Runs `action` in the engine's thread, between two steps."""
        self._raise_if_dead()
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        loop = done.get_loop()
        self._inbox.put(lambda: _resolve(loop, done, action()))
        return await done

    def _raise_if_dead(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"the engine failed: {self._error}") from self._error
        if not self._thread.is_alive():
            raise RuntimeError("the engine is closed")

    def _run(self) -> None:
        """consumes: the inbox · waits for: the inbox while idle · unblocked by: any call, or None, which ends it"""
        try:
            while True:
                if not self._take_commands(block=not self._core.busy):
                    return
                if self._core.busy:
                    started = time.perf_counter()
                    self._deliver(self._core.step())
                    self._busy_seconds += time.perf_counter() - started
                if self._drained and not self._core.scheduler.running:
                    drained, self._drained = self._drained, None
                    drained()
        except BaseException as error:
            self._error = error
            for send in list(self._outboxes.values()):
                send(error)

    def _take_commands(self, *, block: bool) -> bool:
        while block or not self._inbox.empty():
            command = self._inbox.get()
            if command is None:
                return False
            command()
            block = False
        return True

    def _deliver(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            send = self._outboxes.pop(completion.uid, None)
            if send is not None:  # None: the caller went away
                send(completion)


def _resolve(loop: asyncio.AbstractEventLoop, done: asyncio.Future[Result], value: Result) -> None:
    loop.call_soon_threadsafe(lambda: None if done.done() else done.set_result(value))
