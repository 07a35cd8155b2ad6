"""The embedded engine as a role: the core runs in a thread of its own, callers await."""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from lockstep.data.chat import end_tokens
from lockstep.models.engine_view import engine_view
from lockstep.models.loading import Loaded
from lockstep.models.lowbit import LowBitWeights
from lockstep.models.releasable import Releasable
from lockstep.models.routing import Routers
from lockstep.protocols import WeightStore
from lockstep.rollout.config import RolloutConfig, UpdatePolicy
from lockstep.rollout.core import EngineCore
from lockstep.types import Completion, Operator, Request

Result = TypeVar("Result")
Send = Callable[[Completion | RuntimeError], None]


@dataclass(frozen=True, slots=True)
class Command:
    """Something to do in the engine's thread, between two steps."""

    action: Callable[[], Any]
    drained: bool  # only when no answer is running
    done: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        """A failure belongs to whoever asked; the engine goes on."""
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            self.done.set_result(self.action())
        except Exception as error:
            self.done.set_exception(error)


class Embedded:
    """Implements protocols.Engine.

    Requests made in the same turn of the event loop reach the scheduler together, so a batch submitted at once is
    composed the same way in every run. `store` is None when the engine shares the learner's memory: then new weights
    are already in place, and an update is allowed only while nothing runs.

    State has one owner each: `_staged`, `_uids` and `_asleep` the event loop, `_outboxes` and `_drained` the engine's
    thread. Between the two there is only the inbox.
    """

    def __init__(self, core: EngineCore, *, store: WeightStore | None, update: UpdatePolicy = "keep_kv") -> None:
        self._core = core
        self._store = store
        self._policy: UpdatePolicy = update
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # nothing is put into the inbox after the thread's last look at it
        self._ended: RuntimeError | None = None
        self._staged: list[tuple[Request, Send]] = []
        self._uids: set[str] = set()
        self._asleep = False
        self._outboxes: dict[str, Send] = {}
        self._drained: list[Command] = []
        self._busy_seconds = 0.0
        self._stats: dict[str, float] = {}
        if core.runner.burst is not None:
            gc.collect()  # here: a process that ends while the thread is at it is aborted
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    def start(
        cls,
        loaded: Loaded,
        config: RolloutConfig,
        store: WeightStore | None,
        low_bit: LowBitWeights | None = None,
        routers: Routers | None = None,
    ) -> Embedded:
        """As every engine of this folder starts: on a loaded model, with buffers of its own if there is a store.

        `low_bit` takes the place of the model's matrices. What `routers` choose is recorded.
        """
        memory = Releasable(loaded.module.device) if config.sleep else None
        view = engine_view(loaded.module, share=store is None, low_bit=low_bit, routers=routers, memory=memory)
        ends = end_tokens(loaded.tokenizer, loaded.module.generation_config.eos_token_id)  # type: ignore[union-attr]
        return cls(EngineCore(view, loaded.tokenizer, ends, config, routers, memory), store=store, update=config.update)

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        """consumes: requests · waits for: the engine's thread · unblocked by: completions, or the thread's end"""
        self._check(requests)
        results: asyncio.Queue[Completion | RuntimeError] = asyncio.Queue()
        pending = {r.uid for r in requests}
        self._stage(requests, results.put_nowait)
        try:
            while pending:
                item = await results.get()
                if isinstance(item, RuntimeError):
                    raise RuntimeError(str(item)) from item.__cause__
                pending.discard(item.uid)
                self._uids.discard(item.uid)
                yield item
        finally:
            if pending:
                self._abandon(pending)

    async def abort(self, uids: Sequence[str]) -> None:
        await self._call(lambda: self._deliver(self._core.abort(set(uids))))

    async def update_weights(self, version: int) -> None:
        """consumes: one version of the store · waits for: the step under way, or with `drain` the running answers"""
        await self._call(lambda: self._apply_update(version), drained=self._policy == "drain")

    async def operators(self, names: Sequence[str] | None = None) -> Mapping[str, Operator]:
        return await self._call(lambda: self._core.operators(names))

    @property
    def memory(self) -> Releasable | None:
        """What it gives up in its sleep; None if it never does."""
        return self._core.memory

    async def sleep(self) -> None:
        """waits for: the step under way"""
        self._asleep = True
        try:
            await self._call(self._core.sleep)
        except RuntimeError:
            self._asleep = False
            raise

    async def wake(self) -> None:
        await self._call(self._core.wake)
        self._asleep = False

    async def reset_cache(self) -> None:
        await self._call(self._core.scheduler.forget_prefixes)

    async def stats(self) -> Mapping[str, float]:
        now = asdict(self._core.scheduler.counters) | {"busy_seconds": self._busy_seconds}
        since = {name: value - self._stats.get(name, 0) for name, value in now.items()}
        self._stats = now
        return since

    async def close(self) -> None:
        """Ends the thread after the step under way; whoever still waits for an answer is told."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, 60)

    def _check(self, requests: Sequence[Request]) -> None:
        if self._ended is not None:
            raise RuntimeError(str(self._ended)) from self._ended.__cause__
        if self._asleep:
            raise RuntimeError("the engine sleeps: wake it before a request")
        seen: set[str] = set()
        for request in requests:
            self._core.check(request)
            if request.uid in self._uids or request.uid in seen:
                raise ValueError(f"request {request.uid!r} is already running")
            seen.add(request.uid)

    def _stage(self, requests: Sequence[Request], receive: Callable[[Completion | RuntimeError], None]) -> None:
        loop = asyncio.get_running_loop()

        def send(item: Completion | RuntimeError) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(receive, item)

        self._uids.update(r.uid for r in requests)
        self._staged += [(r, send) for r in requests]
        loop.call_soon(self._flush)

    def _flush(self) -> None:
        staged, self._staged = self._staged, []
        if staged:
            self._post(lambda: self._add(staged)).add_done_callback(lambda done: _tell_failure(done, staged))

    def _abandon(self, uids: set[str]) -> None:
        """Nobody waits for these any more. A new request of the same name comes after this command, so it is safe."""
        self._uids -= uids
        self._staged = [(r, send) for r, send in self._staged if r.uid not in uids]
        self._post(lambda: self._forget(uids))

    async def _call(self, action: Callable[[], Result], *, drained: bool = False) -> Result:
        self._flush()  # what was asked for earlier comes first
        return await asyncio.wrap_future(self._post(action, drained=drained))

    def _post(self, action: Callable[[], Result], *, drained: bool = False) -> Future[Result]:
        command = Command(action, drained)
        with self._lock:
            if self._ended is None:
                self._inbox.put(command)
                return command.done
        command.done.set_exception(self._ended)
        return command.done

    def _run(self) -> None:
        """consumes: the inbox · waits for: the inbox while idle · unblocked by: any call, or None, which ends it"""
        ended = RuntimeError("the engine is closed")
        try:
            with _settled(self._core):
                self._run_steps()
        except BaseException as error:
            ended = RuntimeError(f"the engine failed: {error}")
            ended.__cause__ = error
        self._end(ended)

    def _run_steps(self) -> None:
        while self._take_commands(block=not self._core.busy):
            if self._core.busy:
                started = time.perf_counter()
                self._deliver(self._core.step())
                self._busy_seconds += time.perf_counter() - started
            if self._drained and not self._core.scheduler.running:
                self._run_drained()

    def _take_commands(self, *, block: bool) -> bool:
        while block or not self._inbox.empty():
            command = self._inbox.get()
            if command is None:
                return False
            if command.drained and self._core.scheduler.running:
                self._core.scheduler.admitting = False
                self._drained.append(command)
            else:
                command.run()
            block = False
        return True

    def _run_drained(self) -> None:
        commands, self._drained = self._drained, []
        for command in commands:
            command.run()
        self._core.scheduler.admitting = True  # also after an update that failed

    def _end(self, reason: RuntimeError) -> None:
        """Answers everyone who waits or will wait."""
        with self._lock:
            self._ended = reason
        while not self._inbox.empty():
            if (command := self._inbox.get()) is not None:
                self._drained.append(command)
        for command in self._drained:
            if command.done.set_running_or_notify_cancel():
                command.done.set_exception(reason)
        for send in self._outboxes.values():
            send(reason)

    def _add(self, staged: Sequence[tuple[Request, Send]]) -> None:
        self._outboxes |= {request.uid: send for request, send in staged}
        self._core.add([request for request, _ in staged])

    def _forget(self, uids: set[str]) -> None:
        ended = self._core.abort(uids)  # others may be among them, whose routes were on their way
        self._deliver([completion for completion in ended if completion.uid not in uids])
        for uid in uids:
            self._outboxes.pop(uid, None)

    def _apply_update(self, version: int) -> None:
        scheduler = self._core.scheduler
        if self._store is not None:
            self._core.load_weights(self._store.get(version))
        elif scheduler.running:
            raise RuntimeError("weights are shared with the learner: they may not change while answers run")
        scheduler.new_version(version, recompute=self._policy == "reprefill")

    def _deliver(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            self._outboxes.pop(completion.uid)(completion)


@contextmanager
def _settled(core: EngineCore) -> Iterator[None]:
    """Where steps come in bursts, collections leave out what is there now: looking through all of torch and
    transformers takes longer than a burst. Afterwards they see it again, so that an engine that ended gives its memory
    back."""
    if core.runner.burst is None:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _tell_failure(done: Future[None], staged: Sequence[tuple[Request, Send]]) -> None:
    """Requests that never reached the scheduler, because the engine's thread ended first."""
    if isinstance(error := done.exception(), RuntimeError):
        for _, send in staged:
            send(error)
