"""Judging in real processes: rewards that hang, die, lie or print must not hurt the run."""

import asyncio
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import Plugin
from lockstep.tasks.arithmetic import Arithmetic
from lockstep.tasks.judging import Judge
from lockstep.types import Message, Sample, Verdict

FILE = Path(__file__).with_name("judged_tasks.py")
SAMPLE = Sample(uid="train/0", messages=(Message("user", "?"),), answer="42")


def in_event_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(test(**arguments))

    return run


def own_task(name: str) -> Callable[[], Any]:
    return Plugin(package="lockstep.tasks", name=f"{FILE}:{name}").build


@asynccontextmanager
async def judging(time_limit: float = 30.0, workers: int = 1) -> AsyncIterator[Callable[[str], Awaitable[Verdict]]]:
    judge = Judge(own_task("Misbehaves"), time_limit=time_limit, workers=workers)
    try:
        yield lambda answer: judge(SAMPLE, answer)
    finally:
        await judge.close()


def is_gone(pid: int, within: float) -> bool:
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


@in_event_loop
async def test_a_worker_answers_many_times_and_starts_light() -> None:
    async with judging() as judge:
        assert await judge("length abc") == Verdict(value=3.0, parts={"length": 3.0}, reasons=("length: counted",))
        pid = (await judge("pid")).value
        assert pid != os.getpid()
        assert (await judge("pid")).value == pid
        for heavy in ("torch", "transformers", "datasets", "numpy"):
            assert (await judge(f"modules {heavy}")).value == 0.0, heavy


@in_event_loop
async def test_what_is_no_reward_is_failed_never_zero() -> None:
    async with judging() as judge:
        for answer, why in {
            "fail oh no": "failed: the reward raised KeyError: 'oh no' (",
            "leave": "failed: the reward raised SystemExit: 3 (",
            "say nan": "the reward is nan",
            "say inf": "the reward is inf",
            "say none": "the reward is None, which is neither a number nor a Verdict",
            "say text": "the reward is '1.0', which",
        }.items():
            verdict = await judge(answer)
            assert verdict.value is None
            assert why in verdict.reasons[0]
        assert (await judge("say true")).value == 1.0


@in_event_loop
async def test_a_reward_that_forks_answers_once() -> None:
    async with judging() as judge:
        assert [(await judge("fork " + "x" * n)).value for n in range(1, 9)] == list(range(1, 9))


@in_event_loop
async def test_printing_does_not_disturb_the_pipe(capfd: pytest.CaptureFixture[str]) -> None:
    async with judging() as judge:
        assert (await judge("shout hello")).value == 1.0
    out, err = capfd.readouterr()
    assert out == ""
    assert "hello" in err


@pytest.mark.parametrize("forever", ["nap 600", "spin"])
@in_event_loop
async def test_a_reward_that_hangs_is_killed_and_its_worker_replaced(forever: str) -> None:
    async with judging(time_limit=1.0) as judge:
        pid = int((await judge("pid")).value or 0)
        began = time.monotonic()
        verdict = await judge(forever)
        assert time.monotonic() - began < 4
        assert verdict == Verdict(value=None, reasons=("failed: the reward took longer than 1 s",))
        assert is_gone(pid, within=1)
        assert (await judge("length abc")).value == 3.0


@in_event_loop
async def test_what_a_reward_started_dies_with_it(tmp_path: Path) -> None:
    async with judging(time_limit=2.0) as judge:
        assert (await judge(f"spawn {tmp_path / 'pid'}")).failed
        assert is_gone(int((tmp_path / "pid").read_text()), within=1)


@in_event_loop
async def test_a_worker_that_dies_mid_answer_is_replaced() -> None:
    async with judging() as judge:
        verdict = await judge("die")
        assert verdict.reasons == ("failed: the reward's process ended with status -9",)
        assert (await judge("length abc")).value == 3.0


@in_event_loop
async def test_a_worker_killed_from_outside() -> None:
    """Mid-answer its answer fails; idle, nobody notices."""
    async with judging() as judge:
        for answer, expected in (("nap 600", None), ("length abc", 3.0)):
            pid = int((await judge("pid")).value or 0)
            pending = asyncio.ensure_future(judge(answer)) if expected is None else None
            await asyncio.sleep(0.2)
            os.kill(pid, signal.SIGKILL)
            assert is_gone(pid, within=2)
            assert (await (pending or judge(answer))).value == expected


@in_event_loop
async def test_the_event_loop_is_never_blocked() -> None:
    async with judging(workers=2) as judge:
        await asyncio.gather(judge("pid"), judge("pid"))
        pending = asyncio.gather(judge("nap 1"), judge("nap 1"))
        began, ticks = time.monotonic(), 0
        while not pending.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert ticks > 10
        assert time.monotonic() - began < 1.9, "two workers nap at the same time"


@in_event_loop
async def test_close_ends_workers_and_those_who_wait() -> None:
    judge = Judge(own_task("Misbehaves"), workers=1)
    pid = int((await judge(SAMPLE, "pid")).value or 0)
    running = asyncio.ensure_future(judge(SAMPLE, "nap 600"))
    queued = asyncio.ensure_future(judge(SAMPLE, "nap 600"))
    await asyncio.sleep(0.1)
    await judge.close()
    assert is_gone(pid, within=1)
    assert (await running).failed
    assert (await queued).reasons == ("failed: the judge was closed",)
    with pytest.raises(RuntimeError):
        await judge(SAMPLE, "pid")


@in_event_loop
async def test_a_task_that_workers_cannot_build_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TEST_PARENT", str(os.getpid()))
    judge = Judge(own_task("CannotBuild"))
    with pytest.raises(RuntimeError, match=r"could not build the task .* no licence in this process"):
        await judge(SAMPLE, "pid")
    await judge.close()


@in_event_loop
async def test_fast_tasks_are_judged_in_place() -> None:
    judge = Judge(Arithmetic)
    sample = Arithmetic().samples("eval")[0]
    assert (await judge(sample, f"#{sample.answer}")).value == 1.0
    assert not judge._workers
    await judge.close()


PARENT = """
import asyncio, sys
from lockstep.config import Plugin
from lockstep.tasks.judging import Judge
from lockstep.types import Sample

async def main():
    judge = Judge(Plugin(package="lockstep.tasks", name=sys.argv[1]).build, workers=1, time_limit=2.0)
    sample = Sample(uid="0", messages=())
    print(int((await judge(sample, "pid")).value), flush=True)
    await judge(sample, sys.argv[2])
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("answer", ["pid", "spin"])
def test_workers_do_not_outlive_their_parent(answer: str) -> None:
    """Idle they see the pipe close; stuck in C, which is the worst case, the kernel's timer ends them."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, f"{FILE}:Misbehaves", answer], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    time.sleep(0.3)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert is_gone(worker, within=8)
