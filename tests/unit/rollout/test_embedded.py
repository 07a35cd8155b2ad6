"""The engine as its callers see it: streaming, aborts, failures that reach everyone, updates in flight."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine_support import ask, engine_core, finish, prompt, rescore, small
from lockstep.rollout.engines.embedded import Embedded
from lockstep.types import Completion, Request, StopReason
from lockstep.weights.memory import Memory


class Pace:
    """Lets the engine compute only as many steps as it is given."""

    def __init__(self, core: Any) -> None:
        self._allowed = threading.Semaphore(0)
        self._step = core.step
        self.error: Exception | None = None
        core.step = self._paced

    def _paced(self) -> Sequence[Completion]:
        assert self._allowed.acquire(timeout=20), "the test let the engine wait for ever"
        if self.error:
            raise self.error
        return self._step()

    def allow(self, steps: int = 100_000) -> None:
        self._allowed.release(steps)


@asynccontextmanager
async def running(
    module: PreTrainedModel, *, store: Memory | None = None, update: Any = "keep_kv", **options: Any
) -> AsyncIterator[tuple[Embedded, Pace]]:
    core = engine_core(module, **options)
    pace = Pace(core)
    engine = Embedded(core, store=store or Memory(snapshot=True), update=update)
    try:
        yield engine, pace
    finally:
        pace.allow()
        await engine.close()
        assert not engine._thread.is_alive()


def within(test: Callable[[], Awaitable[None]], seconds: float = 20) -> None:
    """Runs an async test; hanging is a failure."""

    async def limited() -> None:
        await asyncio.wait_for(test(), seconds)

    asyncio.run(limited())


async def collect(engine: Embedded, requests: Sequence[Request]) -> list[Completion]:
    return [completion async for completion in engine.generate(requests)]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_answers_stream_as_they_finish(dense: PreTrainedModel) -> None:
    async def test() -> None:
        async with running(dense) as (engine, pace):
            stream = engine.generate([ask("long", prompt(5, seed=1), 9), ask("short", prompt(5, seed=2), 2)])
            first = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            pace.allow(2)
            assert (await first).uid == "short"  # the long one has had two steps of its nine
            pace.allow()
            assert (await anext(stream)).uid == "long"
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    within(test)


def test_concurrent_callers_get_their_own(dense: PreTrainedModel) -> None:
    requests = [ask(f"r{i}", prompt(4 + i, seed=i), 3 + i, temperature=1.0, seed=i) for i in range(12)]
    alone = finish(engine_core(dense), requests)

    async def test() -> None:
        async with running(dense) as (engine, pace):
            pace.allow()
            found = await asyncio.gather(*(collect(engine, requests[i : i + 3]) for i in range(0, 12, 3)))
            assert [sorted(c.uid for c in part) for part in found] == [
                sorted(r.uid for r in requests[i : i + 3]) for i in range(0, 12, 3)
            ]
            assert {c.uid: c for part in found for c in part} == alone  # submitted in one turn: one batch, bit for bit
            stats = await engine.stats()
            assert stats["sampled_tokens"] == sum(3 + i for i in range(12))
            assert (await engine.stats())["sampled_tokens"] == 0

    within(test)


def test_abort_yields_what_there_is(dense: PreTrainedModel) -> None:
    async def test() -> None:
        async with running(dense, max_seqs=1, step_tokens=16) as (engine, pace):
            requests = [ask("running", prompt(5, seed=1), 50), ask("waiting", prompt(5, seed=2), 50)]
            answers = asyncio.create_task(collect(engine, requests))
            await asyncio.sleep(0)
            pace.allow(3)
            await until(lambda: engine._core.scheduler.counters.sampled_tokens == 3)
            abort = asyncio.create_task(engine.abort(["running", "waiting", "unknown"]))
            await asyncio.sleep(0.01)
            pace.allow(1)
            await abort
            found = {c.uid: c for c in await answers}
            assert 3 <= len(found["running"].tokens) <= 4
            assert found["waiting"].tokens == []
            assert {c.stop_reason for c in found.values()} == {StopReason.ABORTED}
            assert engine._core.scheduler.idle

    within(test)


def test_abort_right_after_asking(dense: PreTrainedModel) -> None:
    """In the same turn of the loop, before the request has even left it."""

    async def test() -> None:
        async with running(dense) as (engine, pace):
            answers = asyncio.create_task(collect(engine, [ask("r", prompt(5, seed=1), 50)]))
            await asyncio.sleep(0)
            abort = asyncio.create_task(engine.abort(["r"]))
            pace.allow()
            await abort
            assert (await answers)[0].stop_reason is StopReason.ABORTED

    within(test)


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_leaving_the_stream_aborts_and_frees_the_name(dense: PreTrainedModel, how: str) -> None:
    async def test() -> None:
        async with running(dense) as (engine, pace):
            requests = [ask("a", prompt(5, seed=1), 3), ask("b", prompt(5, seed=2), 90)]
            stream = engine.generate(requests)
            pace.allow(3)
            assert (await anext(stream)).uid == "a"
            if how == "close":
                await stream.aclose()  # type: ignore[attr-defined]
            else:
                rest = asyncio.create_task(anext(stream))
                await asyncio.sleep(0)
                rest.cancel()
                await asyncio.gather(rest, return_exceptions=True)
            again = asyncio.create_task(collect(engine, [ask("b", prompt(5, seed=2), 4)]))  # the same name at once
            pace.allow()
            (completion,) = await again
            assert completion.stop_reason is StopReason.LENGTH
            assert len(completion.tokens) == 4
            assert engine._core.scheduler.idle

    within(test)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (ask("x", ()), "'x': no prompt tokens"),
        (ask("x", prompt(128, seed=0)), "'x': 128 prompt tokens leave no room in a context of 128"),
        (ask("x", (1, 300, 2)), "'x': token 300 is outside the vocabulary of 261"),
        (ask("x", (1, -1, 2)), "'x': token -1 is outside"),
        (ask("x", (1,), 0), "'x': max_tokens is 0"),
        (ask("x", (1,), temperature=-1.0), "'x': temperature is -1.0: 0, which is greedy, or at least 1e-06"),
        (ask("x", (1,), temperature=float("nan")), "'x': temperature is nan"),
        (ask("x", (1,), temperature=1e-40), "'x': temperature is 1e-40"),
        (ask("x", (1,), top_p=0.0), "'x': sampling parameters out of range"),
        (ask("x", (1,), stop=("",)), "'x': an empty stop string"),
        (ask("x", (1,), 60), "'x': 61 tokens may be needed, rollout.kv_gib = .* holds 48"),
        (ask("good", (1,)), "'good' is already running"),
    ],
)
def test_a_bad_request_is_refused_by_name_before_any_work(dense: PreTrainedModel, bad: Request, complaint: str) -> None:
    async def test() -> None:
        async with running(dense, pages=3) as (engine, pace):
            with pytest.raises(ValueError, match=complaint):
                await collect(engine, [ask("good", (1, 2)), bad])
            assert engine._core.scheduler.idle
            pace.allow()
            assert len(await collect(engine, [ask("good", (1, 2))])) == 1

    within(test)


def test_too_little_memory_for_anything(dense: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"rollout.kv_gib = 1e-09 does not hold"):
        engine_core(dense, kv_gib=1e-9)


def test_a_failure_in_the_thread_reaches_everyone(dense: PreTrainedModel) -> None:
    """Those who wait for answers, for an abort, for an update, those still queued, and those who come later."""

    async def test() -> None:
        async with running(dense, update="drain") as (engine, pace):
            pace.error = MemoryError("no memory left")
            waiting = [
                asyncio.create_task(collect(engine, [ask("a", (1, 2))])),
                asyncio.create_task(collect(engine, [ask("b", (1, 2)), ask("c", (3,))])),
            ]
            await asyncio.sleep(0.01)
            later = [engine.update_weights(1), engine.abort(["a"]), collect(engine, [ask("d", (1, 2))])]
            waiting += [asyncio.ensure_future(w) for w in later]
            await asyncio.sleep(0.01)
            pace.allow()
            for outcome in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(outcome, RuntimeError)
                assert str(outcome) == "the engine failed: no memory left"
            with pytest.raises(RuntimeError, match="the engine failed: no memory left") as caught:
                await collect(engine, [ask("e", (1, 2))])
            assert isinstance(caught.value.__cause__, MemoryError)
            with pytest.raises(RuntimeError, match="the engine failed"):
                await engine.reset_cache()

    within(test)


def test_closing_answers_those_who_wait(dense: PreTrainedModel) -> None:
    async def test() -> None:
        async with running(dense) as (engine, pace):
            answers = asyncio.create_task(collect(engine, [ask("a", (1, 2), 100)]))
            await asyncio.sleep(0)
            closing = asyncio.create_task(engine.close())
            await asyncio.sleep(0.01)
            pace.allow(1)
            await closing
            with pytest.raises(RuntimeError, match="the engine is closed"):
                await answers
            with pytest.raises(RuntimeError, match="the engine is closed"):
                await engine.update_weights(1)

    within(test)


def test_an_engine_outlives_an_event_loop(dense: PreTrainedModel) -> None:
    """A loop that ends while requests run takes its waiters along, not the engine."""
    core = engine_core(dense)
    engine = Embedded(core, store=Memory(snapshot=True))

    async def leave() -> None:
        task = asyncio.create_task(collect(engine, [ask(f"r{i}", (1, 2), 100) for i in range(8)]))
        await asyncio.sleep(0.005)
        task.cancel()

    async def use() -> None:
        assert len(await collect(engine, [ask("r0", (1, 2), 4)])) == 1
        await engine.close()

    within(leave)
    within(use)


def published(*versions: int) -> tuple[Memory, dict[int, PreTrainedModel]]:
    return Memory(snapshot=True), {version: small(seed=version) for version in versions}


def weights(module: PreTrainedModel) -> Mapping[str, Tensor]:
    return module.state_dict()


def test_drain_lets_running_answers_finish_first(dense: PreTrainedModel) -> None:
    """Even two updates in a row; what waits starts under the new weights."""
    store, modules = published(1)

    async def test() -> None:
        async with running(dense, store=store, update="drain", max_seqs=2) as (engine, pace):
            requests = [ask(f"r{i}", prompt(5, seed=i), 12) for i in range(4)]
            found = asyncio.create_task(collect(engine, requests))
            await asyncio.sleep(0)
            pace.allow(2)
            await until(lambda: engine._core.scheduler.counters.sampled_tokens >= 2)
            store.put(1, weights(modules[1]))
            updates = [asyncio.create_task(engine.update_weights(1)) for _ in range(2)]
            await asyncio.sleep(0.01)
            assert not any(u.done() for u in updates)
            pace.allow()
            await asyncio.gather(*updates)
            by_uid = {c.uid: c for c in await found}
            assert [set(by_uid[f"r{i}"].versions) for i in range(4)] == [{0}, {0}, {1}, {1}]
            for request in requests:
                completion = by_uid[request.uid]
                scored = rescore({0: dense, **modules}[completion.versions[0]], request, completion)
                torch.testing.assert_close(torch.tensor(completion.logp), scored, atol=1e-4, rtol=0)

    within(test)


@pytest.mark.parametrize("policy", ["keep_kv", "reprefill", "drain"])
def test_an_unknown_version_is_an_error_and_the_engine_goes_on(dense: PreTrainedModel, policy: str) -> None:
    async def test() -> None:
        async with running(dense, update=policy, max_seqs=1, step_tokens=16) as (engine, pace):
            found = asyncio.create_task(collect(engine, [ask("a", (1, 2)), ask("b", (3, 4))]))
            await asyncio.sleep(0)
            update = asyncio.create_task(engine.update_weights(7))
            await asyncio.sleep(0)
            pace.allow()
            with pytest.raises(LookupError, match="weight version 7 is not held"):
                await update
            assert {v for c in await found for v in c.versions} == {0}

    within(test)


@pytest.mark.parametrize("policy", ["keep_kv", "reprefill", "drain"])
def test_updates_at_any_moment(dense: PreTrainedModel, policy: str) -> None:
    """Without any pacing: recorded versions never go back, and the last answers are of the last version."""
    store, modules = published(1, 2)

    async def test() -> None:
        async with running(dense, store=store, update=policy) as (engine, pace):
            pace.allow()
            requests = [ask(f"r{i}", prompt(5, seed=i), 40, temperature=1.0, seed=i) for i in range(4)]
            found = asyncio.create_task(collect(engine, requests))
            for version, module in modules.items():
                await asyncio.sleep(0.02)
                store.put(version, weights(module))
                await engine.update_weights(version)
            for completion in await found:
                assert completion.versions == sorted(completion.versions)
                assert policy != "drain" or len(set(completion.versions)) == 1
            last = ask("last", prompt(40, seed=9), 8)
            (completion,) = await collect(engine, [last])
            assert set(completion.versions) == {2}
            torch.testing.assert_close(
                torch.tensor(completion.logp), rescore(modules[2], last, completion), atol=1e-4, rtol=0
            )

    within(test)


def test_shared_weights_may_not_change_under_running_answers(dense: PreTrainedModel) -> None:
    async def test() -> None:
        core = engine_core(dense)
        pace = Pace(core)
        engine = Embedded(core, store=None)
        found = asyncio.create_task(collect(engine, [ask("a", (1, 2))]))
        await asyncio.sleep(0)
        pace.allow(1)
        await until(lambda: bool(core.scheduler.running))
        update = asyncio.create_task(engine.update_weights(1))
        await asyncio.sleep(0.01)
        pace.allow()
        with pytest.raises(RuntimeError, match="may not change while answers run"):
            await update
        await found
        await engine.update_weights(1)
        (completion,) = await collect(engine, [ask("b", (1, 2))])
        assert set(completion.versions) == {1}
        await engine.close()

    within(test)


def test_reset_cache_leaves_no_trace(dense: PreTrainedModel) -> None:
    async def test() -> None:
        async with running(dense) as (engine, pace):
            pace.allow()
            for _ in range(2):
                await collect(engine, [ask("r", prompt(40, seed=1), 4)])
                await engine.reset_cache()
            assert (await engine.stats())["prefix_hit_tokens"] == 0

    within(test)


def test_an_engine_that_ended_gives_its_memory_back(dense: PreTrainedModel) -> None:
    """Views refer to themselves, so only a collection frees them; what was frozen is never looked at by one."""
    assert not gc.get_freeze_count()

    def start() -> tuple[Embedded, weakref.ref[PreTrainedModel]]:
        core = engine_core(dense)
        core.module.forward = core.module.forward  # as replaced forwards do
        core.runner.burst = cast(Any, object())  # of which nothing is asked
        return Embedded(core, store=Memory(snapshot=True)), weakref.ref(core.module)

    async def test() -> weakref.ref[PreTrainedModel]:
        engine, view = start()
        await until(lambda: gc.get_freeze_count() > 0)
        await engine.close()
        return view

    view = asyncio.run(asyncio.wait_for(test(), 20))
    assert not gc.get_freeze_count()
    gc.collect()
    assert view() is None
