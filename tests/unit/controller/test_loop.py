"""The whole loop with fakes for every role: the controller knows protocols only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.bus.memory import Memory
from lockstep.controller.checkpoints import Checkpoints, Progress
from lockstep.controller.config import CheckpointConfig, TrainConfig
from lockstep.controller.governor import GovernorConfig
from lockstep.controller.loop import Controller, Roles
from lockstep.controller.steward import Reach
from lockstep.metrics import describe
from lockstep.protocols import Approve
from lockstep.types import Group, GroupReceipt, Message, Sample, StepResult

FRESH = Progress(step=0, version=0, next_index=0, unfinished=[])


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@dataclass
class FakeEngine:
    versions: list[int] = field(default_factory=list)
    resets: int = 0
    asleep: bool = False

    def generate(self, requests: Any) -> Any:
        raise AssertionError("the loop never samples itself")

    async def abort(self, uids: Any) -> None: ...

    async def update_weights(self, version: int) -> None:
        assert not self.asleep
        await turns(2)
        self.versions.append(version)

    async def sleep(self) -> None:
        await turns(2)
        self.asleep = True

    async def wake(self) -> None:
        assert self.asleep
        self.asleep = False

    async def reset_cache(self) -> None:
        self.resets += 1

    async def stats(self) -> Mapping[str, float]:
        names = ("busy_seconds", "sampled_tokens", "prompt_tokens", "prefix_hit_tokens", "preemptions")
        return dict.fromkeys(names, 1.0)

    async def close(self) -> None: ...


@dataclass
class FakeRollout:
    bus: Memory
    duration: Callable[[int], int] = lambda index: index % 5
    signal: Callable[[int], bool] = lambda index: True
    fails_at: int = -1
    started: list[int] = field(default_factory=list)
    cancelled: int = 0

    async def run(self, index: int, sample: Sample, version: int) -> GroupReceipt:
        self.started.append(index)
        assert sample.uid == f"train/{index}"
        try:
            await turns(self.duration(index))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if index == self.fails_at:
            raise RuntimeError(f"group {index} broke")
        await self.bus.put(Group(index=index, sample=sample, version=version, trajectories=()))
        rewards = (0.0, 1.0) if self.signal(index) else (1.0, 1.0)
        return GroupReceipt(
            index=index,
            rewards=rewards,
            num_failed=0,
            num_truncated=0,
            num_tokens=8,
            has_signal=self.signal(index),
            parts={"correct": rewards},
        )


@dataclass
class FakeLearner:
    """Its whole state is the list of steps it has learned, each a list of indices."""

    bus: Memory
    version: int = 0
    trained: list[list[int]] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    correction: str = "tis"
    learning_rate: float = 1.0
    measured: Callable[[int], Mapping[str, float]] = lambda step: {"mismatch/k3": 0.0}
    learns: Callable[[int], bool] = lambda step: True
    on_step: Callable[[int], None] = lambda step: None
    save_error: Callable[[int], OSError | None] = lambda step: None

    async def step(self, step: int, groups: AsyncIterator[int], approve: Approve = lambda measured: True) -> StepResult:
        taken: list[int] = []
        async for index in groups:
            group = await self.bus.get(index)
            self.lags.append(self.version - group.version)
            await turns(3)
            taken.append(index)
        approved = approve(self.measured(step))
        learns = approved and self.learns(step)
        if approved:
            self.trained.append(taken)
        self.version += 1
        self.on_step(step)
        updates = {"policy/updates": float(learns), "policy/nonfinite": 0.0}
        return StepResult(version=self.version, metrics={"policy/loss": 0.5, "time/learn": 0.0, **updates})

    async def set_correction(self, name: str) -> None:
        self.correction = name

    async def set_learning_rate(self, rate: float) -> None:
        self.learning_rate = rate

    async def save(self, folder: Path) -> None:
        (folder / "state.json").write_text(json.dumps(self.trained))
        if error := self.save_error(len(self.trained)):
            raise error

    async def close(self) -> None: ...


@dataclass
class FakeRecorder:
    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    events: list[tuple[int, str, str]] = field(default_factory=list)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((step, dict(metrics)))

    def samples(self, step: int, group: Group) -> None: ...

    def event(self, step: int, kind: str, text: str) -> None:
        self.events.append((step, kind, text))


class Lab:
    """A run that can be stopped, broken and resumed."""

    def __init__(self, folder: Path, **train: int) -> None:
        self.config = TrainConfig(**{"steps": 6, "prompts": 4, **train})
        self.checkpoints = Checkpoints(folder / "checkpoints", keep=2)
        self.accuracy: Callable[[int], float] | None = None
        self.every, self.eval_every, self.dynamic_sampling, self.sleeps = 0, 0, False, False
        self.governor = GovernorConfig(mode="off")
        self.precisions: tuple[str, ...] = ()
        self.renew()

    def renew(self) -> None:
        """A new process: every role afresh, the learner from the last checkpoint."""
        self.bus, self.engine, self.recorder = Memory(), FakeEngine(), FakeRecorder()
        self.rollout, self.learner = FakeRollout(self.bus), FakeLearner(self.bus)
        self.progress = FRESH
        if found := self.checkpoints.latest():
            folder, self.progress = found
            self.learner.trained = json.loads((folder / "state.json").read_text())
            self.learner.version = self.progress.version

    def controller(self) -> Controller:
        roles = Roles(
            engine=self.engine,
            rollout=self.rollout,
            learner=self.learner,
            bus=self.bus,
            recorder=self.recorder,
            sample=lambda i: Sample(uid=f"train/{i}", messages=(Message("user", "?"),)),
            evaluate=self._evaluate if self.accuracy else None,
            checkpoints=self.checkpoints,
        )
        return Controller(
            roles,
            self.config,
            CheckpointConfig(every=self.every),
            progress=self.progress,
            eval_every=self.eval_every,
            dynamic_sampling=self.dynamic_sampling,
            governor=self.governor,
            reach=Reach(corrections=("icepop", "mis"), precisions=self.precisions, learning_rate=1.0),
            sleeps=self.sleeps,
        )

    async def _evaluate(self) -> Mapping[str, float]:
        assert self.accuracy is not None
        await turns(5)
        return {"eval/accuracy": self.accuracy(len(self.learner.trained))}

    def run(self, controller: Controller | None = None) -> Progress:
        return asyncio.run(limited((controller or self.controller()).run()))

    @property
    def trained(self) -> list[int]:
        return [index for step in self.learner.trained for index in step]


async def limited(run: Awaitable[Progress]) -> Progress:
    return await asyncio.wait_for(run, 20)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_a_run(tmp_path: Path, max_staleness: int) -> None:
    lab = Lab(tmp_path, max_staleness=max_staleness)
    progress = lab.run()
    assert (progress.step, progress.version) == (6, 6)
    assert [len(step) for step in lab.learner.trained] == [4] * 6
    assert len(set(lab.trained)) == 24
    assert max(lab.learner.lags) <= max_staleness
    assert lab.engine.versions == [1, 2, 3, 4, 5, 6]
    if max_staleness == 0:
        assert lab.trained == list(range(24))
        assert lab.rollout.started == list(range(24))
    steps = [(step, row) for step, row in lab.recorder.rows if "reward/mean" in row]
    assert [step for step, _ in steps] == [1, 2, 3, 4, 5, 6]
    assert all(describe(name) for _, row in lab.recorder.rows for name in row), "every logged name is documented"
    assert steps[0][1]["reward/mean"] == 0.5
    found = lab.checkpoints.latest()
    assert found is not None
    assert found[1] == progress


@pytest.mark.parametrize("dynamic_sampling", [False, True])
def test_an_engine_that_sleeps_has_nothing_to_do_while_the_learner_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dynamic_sampling: bool
) -> None:
    lab = Lab(tmp_path)
    lab.sleeps, lab.dynamic_sampling = True, dynamic_sampling
    lab.rollout.duration = lambda i: 7 * (i % 3)
    lab.rollout.signal = lambda i: i % 5 != 2
    take, seen = lab.bus.get, []

    async def taken(index: int) -> Group:
        seen.append((lab.engine.asleep, len(lab.rollout.started)))
        return await take(index)

    monkeypatch.setattr(lab.bus, "get", taken)
    lab.run()
    assert all(asleep for asleep, _ in seen)
    batches = [{started for _, started in seen[i : i + 4]} for i in range(0, 24, 4)]
    assert all(len(started) == 1 for started in batches), "nothing started between the first group and the last"
    assert lab.engine.versions == [1, 2, 3, 4, 5, 6]
    assert not lab.engine.asleep


def test_no_steps_at_all(tmp_path: Path) -> None:
    lab = Lab(tmp_path, steps=0)
    assert lab.run().step == 0
    assert lab.checkpoints.latest() is not None
    assert lab.rollout.started == []


@settings(max_examples=40, deadline=None)
@given(
    max_staleness=st.integers(0, 3),
    stops=st.lists(st.integers(1, 5), max_size=3),
    durations=st.lists(st.integers(0, 40), min_size=1, max_size=7),
    every=st.integers(0, 2),
    silent=st.sets(st.integers(0, 10), max_size=6),
)
def test_stopped_and_resumed_no_prompt_is_skipped_or_trained_twice(
    tmp_path_factory: pytest.TempPathFactory,
    max_staleness: int,
    stops: list[int],
    durations: list[int],
    every: int,
    silent: set[int],
) -> None:
    """Whatever the timing, wherever it stops: all prompts up to the last one admitted were trained or had no signal."""
    lab = Lab(tmp_path_factory.mktemp("run"), max_staleness=max_staleness, steps=6, prompts=3)
    lab.every, lab.dynamic_sampling = every, True
    replaced: set[int] = set()
    for stop in [*stops, None]:
        lab.renew()
        lab.rollout.duration = lambda i: durations[i % len(durations)]
        lab.rollout.signal = lambda i: i % 11 not in silent
        controller = lab.controller()
        if stop is not None:
            at = len(lab.learner.trained) + stop
            lab.learner.on_step = lambda step, at=at, c=controller: c.stop() if step + 1 >= at else None
        progress = lab.run(controller)
        replaced |= {i for i in lab.rollout.started if i % 11 in silent}
    assert progress.step == 6
    assert len(lab.trained) == len(set(lab.trained)) == 18
    gone = {i for i in replaced if i not in lab.trained}
    assert set(range(progress.next_index)) == {*lab.trained, *progress.unfinished, *gone}
    if max_staleness == 0:
        assert lab.trained == sorted(lab.trained)
        assert progress.unfinished == []


def test_a_resumed_run_trains_what_an_unbroken_one_trains(tmp_path: Path) -> None:
    whole = Lab(tmp_path / "whole")
    whole.run()
    broken = Lab(tmp_path / "broken")
    controller = broken.controller()
    broken.learner.on_step = lambda step: controller.stop() if step == 2 else None
    assert broken.run(controller).step == 3
    assert any(kind == "stopped" for _, kind, _ in broken.recorder.events)
    broken.renew()
    broken.run()
    assert broken.learner.trained == whole.learner.trained


def test_a_stop_while_waiting_gives_up_what_is_being_sampled(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.rollout.duration = lambda i: 1_000_000 if i == 6 else 1
    controller = lab.controller()

    async def run() -> Progress:
        task = asyncio.create_task(controller.run())
        while 6 not in lab.rollout.started:
            await asyncio.sleep(0)
        await turns(50)
        controller.stop()
        return await limited(task)

    progress = asyncio.run(run())
    assert (progress.step, lab.rollout.cancelled) == (1, 1)
    assert lab.recorder.events[-1][1] == "stopped"
    lab.renew()
    lab.run()
    assert lab.trained == list(range(24))


def test_a_failing_rollout_ends_the_run_with_its_error(tmp_path: Path) -> None:
    lab = Lab(tmp_path, max_staleness=1)
    lab.every, lab.rollout.fails_at = 1, 9
    with pytest.raises(RuntimeError, match="group 9 broke"):
        lab.run()
    found = lab.checkpoints.latest()
    assert found is not None
    assert found[1].step >= 1  # what was saved is still there


def test_a_failing_learner_ends_the_run_with_its_error(tmp_path: Path) -> None:
    def fail(step: int) -> None:
        raise FloatingPointError("loss is NaN")

    lab = Lab(tmp_path, max_staleness=1)
    lab.learner.on_step = fail
    with pytest.raises(FloatingPointError, match="loss is NaN"):
        lab.run()


def test_a_full_disk_costs_a_checkpoint_not_the_run(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.every = 1
    lab.learner.save_error = lambda step: OSError(28, "No space left on device") if step in (2, 3) else None
    assert lab.run().step == 6
    failed = [(step, text) for step, kind, text in lab.recorder.events if kind == "save-failed"]
    assert [step for step, _ in failed] == [2, 3]
    assert "No space left on device" in failed[0][1]


def test_a_full_disk_at_the_end_is_an_error(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.learner.save_error = lambda step: OSError(28, "No space left on device") if step == 6 else None
    with pytest.raises(OSError, match="No space left"):
        lab.run()
    found = lab.checkpoints.latest()
    assert found is not None
    assert found[1].step == 0


def test_evaluation_marks_the_best_and_leaves_no_trace(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.eval_every = 2
    lab.accuracy = lambda step: {0: 0.1, 2: 0.7, 4: 0.5, 6: 0.6}[step]
    progress = lab.run()
    assert progress.best == 0.7
    best = lab.checkpoints.best()
    assert best is not None
    assert best.name == "step-000002"
    assert lab.engine.resets == 4


def test_of_equal_evaluations_the_last_is_the_best(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.eval_every = 2
    lab.accuracy = lambda step: {0: 0.1, 2: 0.7, 4: 0.7, 6: 0.7}[step]
    lab.run()
    best = lab.checkpoints.best()
    assert best is not None
    assert best.name == "step-000006"
    assert not (tmp_path / "checkpoints/step-000004").exists(), "no better, and not due"


def test_killed_in_its_first_step_it_does_not_evaluate_again(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.accuracy = lambda step: 0.5

    async def until_saved() -> None:
        running = asyncio.create_task(lab.controller().run())
        while lab.checkpoints.latest() is None:
            await asyncio.sleep(0)
        running.cancel()

    asyncio.run(until_saved())
    lab.renew()
    assert (lab.progress.step, lab.progress.best) == (0, 0.5)
    lab.accuracy = lambda step: {6: 0.7}[step]
    assert lab.run().best == 0.7


def test_the_best_is_marked_even_if_its_first_save_failed(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    errors = iter([OSError(28, "No space left on device"), None])
    lab.learner.save_error = lambda step: next(errors) if step == 6 else None
    lab.accuracy = lambda step: step / 10
    lab.run()
    best = lab.checkpoints.best()
    assert best is not None
    assert best.name == "step-000006"


def test_steps_that_move_no_weight_are_told_with_the_reason(tmp_path: Path) -> None:
    lab = Lab(tmp_path, steps=25)
    lab.learner.learns = lambda step: step < 2
    lab.rollout.signal = lambda index: False
    lab.run()
    why = "no prompt had answers with different rewards to learn from"
    assert [(step, text) for step, kind, text in lab.recorder.events if kind == "idle"] == [
        (3, f"this step moved no weight: {why}"),
        (12, f"no weight has moved for 10 steps: {why}"),
        (22, f"no weight has moved for 20 steps: {why}"),
    ]


def test_dynamic_sampling_replaces_up_to_its_cap(tmp_path: Path) -> None:
    """A task without any signal must not run for ever."""
    lab = Lab(tmp_path, steps=2, prompts=2, max_replaced=3)
    lab.dynamic_sampling = True
    lab.rollout.signal = lambda index: False
    lab.run()
    assert [row["rollout/replaced"] for _, row in lab.recorder.rows if "rollout/replaced" in row] == [6, 6]
    assert len(lab.rollout.started) == 2 * (6 + 2)
