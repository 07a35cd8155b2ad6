"""The loop: sampling and learning, held together by the gate. It moves references and versions, never tensors."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lockstep.controller.audit import Audit
from lockstep.controller.checkpoints import Checkpoints, Progress
from lockstep.controller.config import CheckpointConfig, TrainConfig
from lockstep.controller.gate import Gate, Stopped
from lockstep.controller.governor import GovernorConfig
from lockstep.controller.idleness import Idleness
from lockstep.controller.steward import Halted, Reach, Steward
from lockstep.protocols import Bus, Engine, Learner, Recorder, Rollout
from lockstep.types import FLAWS, GroupReceipt, Sample, StepResult

Evaluate = Callable[[], Awaitable[Mapping[str, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Everything the loop talks to."""

    engine: Engine
    rollout: Rollout
    learner: Learner
    bus: Bus
    recorder: Recorder
    sample: Callable[[int], Sample]  # the prompt at an index of the run's order
    evaluate: Evaluate | None
    checkpoints: Checkpoints
    audit: Audit | None = None


@dataclass(slots=True)
class Tally:
    """The groups of one step, and those replaced on the way to it, as their receipts tell."""

    rewards: list[float] = field(default_factory=list)
    failed: int = 0
    failure: str = ""  # why one of them did
    truncated: int = 0
    answers: int = 0
    tokens: int = 0
    groups: int = 0
    no_signal: int = 0
    replaced: int = 0
    too_long: int = 0
    negative: int = 0
    flaws: Counter[str] = field(default_factory=Counter)
    parts: dict[str, list[float]] = field(default_factory=dict)

    def add(self, receipt: GroupReceipt) -> None:
        self.rewards += receipt.rewards
        self.failed += receipt.num_failed
        self.failure = self.failure or receipt.failure
        self.truncated += receipt.num_truncated
        self.answers += len(receipt.rewards) + receipt.num_failed
        self.tokens += receipt.num_tokens
        self.too_long += receipt.too_long
        self.groups += 1
        self.no_signal += not receipt.has_signal
        self.negative += receipt.num_negative
        self.flaws.update(receipt.flaws)
        for part, values in receipt.parts.items():
            self.parts.setdefault(part, []).extend(values)

    def metrics(self) -> dict[str, float]:
        found = {
            "reward/failed": self.failed,
            "rollout/no_signal": self.no_signal,
            "rollout/replaced": self.replaced,
            "rollout/too_long": self.too_long,
            **{f"reward/part/{name}": sum(values) / len(values) for name, values in self.parts.items()},
        }
        if self.rewards:
            mean = sum(self.rewards) / len(self.rewards)
            found["reward/mean"] = mean
            found["reward/std"] = (sum((r - mean) ** 2 for r in self.rewards) / len(self.rewards)) ** 0.5
        if self.answers:
            found["rollout/length"] = self.tokens / self.answers
            found["rollout/truncated"] = self.truncated / self.answers
        if self.negative:
            found |= {f"rollout/{flaw}": self.flaws[flaw] / self.negative for flaw in FLAWS}
        return found

    def why_idle(self, nonfinite: bool) -> str:
        """Why nothing was learned from these groups though the governor let it be."""
        if self.failed == self.answers:
            return "every reward failed, or no prompt left room for an answer; samples.jsonl has the reasons"
        if nonfinite:
            return "the gradient was inf or NaN"
        if self.no_signal == self.groups:
            return "no prompt had answers with different rewards to learn from"
        return "every answer was left out (cut off or rejected) or had no advantage"


class Controller:
    """Runs training from `progress` to the last step, or until `stop` is called."""

    def __init__(
        self,
        roles: Roles,
        train: TrainConfig,
        checkpoint: CheckpointConfig,
        *,
        progress: Progress,
        eval_every: int,
        dynamic_sampling: bool,
        governor: GovernorConfig,
        reach: Reach,
        sleeps: bool = False,
    ) -> None:
        """`sleeps`: the engine gives its memory to the learner while that learns."""
        self.roles = roles
        self.config = train
        self.checkpoint = checkpoint
        self.progress = progress
        self.eval_every = eval_every
        self.dynamic_sampling = dynamic_sampling
        self.sleeps = sleeps
        last = progress.version + train.steps - progress.step
        self.gate = Gate(train.prompts, train.max_staleness, version=progress.version, last=last)
        self.steward = Steward(governor, roles.learner, self.gate, roles.recorder, reach)
        self._idleness = Idleness(roles.recorder)
        self._approved = True  # the step under way, by the governor
        self._next_index = progress.next_index
        self._again = list(progress.unfinished)
        self._tally = Tally()
        self._arrived: dict[int, GroupReceipt] = {}  # sampled, neither ready nor dropped yet
        self._receipts: dict[int, GroupReceipt] = {}  # of groups that wait for their step
        self._rollouts: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._ending = False
        self._started = time.monotonic() - progress.train_seconds
        self._saved_step = progress.step if progress.step else -1
        self._best_step = -1  # where this run saw its best evaluation

    async def run(self) -> Progress:
        """consumes: prompts · waits for: rollouts and the learner · unblocked by: the gate, a stop, any failure

        Raises Halted, with everything saved, if the governor stopped it.
        """
        self.steward.load(self.progress.governor, self.progress.step)
        await self._before_first_step()
        producer = asyncio.create_task(self._produce())
        producer.add_done_callback(self._stop_if_failed)
        try:
            await self._train()
        except Stopped:
            if self._failure is not None:
                await self._save()  # the weights are those of the last whole step
                raise self._failure from None
            self.roles.recorder.event(self.progress.step, "stopped", "stopped on request; --resume goes on from here")
        finally:
            await self._end([producer, *self._rollouts])
        await self._save(final=True)
        if self.steward.halted:
            raise Halted(self.steward.halted)
        return self.progress

    def stop(self) -> None:
        """Asks the run to end after the update under way; what is still being sampled is given up."""
        self.gate.stop()

    @property
    def to_be_rebuilt(self) -> bool:
        """`run` returned only to go on, from what it saved, with roles that sample in a higher precision."""
        return self.steward.moving and not self.gate.stopped and self.progress.step < self.config.steps

    async def _before_first_step(self) -> None:
        if self.roles.audit is not None:
            await self.roles.audit.whole()
        if self.progress.step == 0 and self.progress.best is None:  # else both were done before it was killed
            if self.roles.evaluate is not None:
                await self._evaluate()
            await self._save()

    async def _train(self) -> None:
        while self.progress.step < self.config.steps and not self.steward.halted:
            if self.gate.stopped:
                raise Stopped
            if self.steward.moving:
                return
            started = time.monotonic()
            result = await self.roles.learner.step(self.progress.step, self._groups(), self._approve)
            learned = time.monotonic()
            if self.sleeps:
                await self.roles.engine.wake()
            await self.roles.engine.update_weights(result.version)
            synced = time.monotonic()
            if self.roles.audit is not None:
                await self.roles.audit.sample(result.version)
            await self.steward.act(self.progress.step + 1)
            self._note_progress(result)
            now = time.monotonic()
            times = {"time/sync": synced - learned, "time/audit": now - synced, "time/total": now - started}
            await self._log(result, times)
            await self._after_step()
            self.gate.advance(result.version)  # last: without staleness nothing else runs during an evaluation

    async def _produce(self) -> None:
        """consumes: prompts, in order · waits for: room at the gate · unblocked by: steps that end, dropped groups"""
        while True:
            indices = [self._take_index() for _ in range(self.gate.room)]
            self.gate.admit(indices)
            for index in indices:
                task = asyncio.create_task(self._roll(index, self.gate.version))
                self._rollouts.add(task)
                task.add_done_callback(self._rollouts.discard)
                task.add_done_callback(self._stop_if_failed)
            await self.gate.changed()

    async def _groups(self) -> AsyncIterator[int]:
        """The groups of one step, on their way to the learner."""
        async for index in self._whole_batch() if self.sleeps else self.gate.step():
            self._tally.add(self._receipts.pop(index))
            yield index

    async def _whole_batch(self) -> AsyncIterator[int]:
        """consumes: ready groups · waits for: the last of them, then for the engine to fall asleep"""
        indices = [index async for index in self.gate.step()]
        await self.roles.engine.sleep()
        for index in indices:
            yield index

    def _approve(self, measured: Mapping[str, float]) -> bool:
        """Whether the step under way may move the weights, by what the learner measured and the receipts tell."""
        self._approved = self.steward.approve(self.progress.step + 1, {**measured, **self._tally.metrics()})
        return self._approved

    def _take_index(self) -> int:
        if self._again:
            return self._again.pop(0)
        self._next_index += 1
        return self._next_index - 1

    async def _roll(self, index: int, version: int) -> None:
        """Which groups are replaced may depend on how many already were, so without staleness (where a run must be
        repeatable) that is decided for the whole batch at once, in order of prompts."""
        self._arrived[index] = await self.roles.rollout.run(index, self.roles.sample(index), version)
        if self.dynamic_sampling and self.gate.max_staleness == 0 and len(self._arrived) < self.gate.num_in_flight:
            return
        for arrived in sorted(self._arrived):
            await self._settle(arrived, self._arrived.pop(arrived))

    async def _settle(self, index: int, receipt: GroupReceipt) -> None:
        """Ready to be learned from, or without signal and replaced."""
        may_replace = self._tally.replaced < self.config.max_replaced * self.config.prompts
        if self.dynamic_sampling and not receipt.has_signal and may_replace:
            self._tally.add(receipt)
            self._tally.replaced += 1
            await self.roles.bus.drop(index)
            self.gate.drop(index)
        else:
            self._receipts[index] = receipt
            self.gate.finish(index)

    def _stop_if_failed(self, task: asyncio.Task[None]) -> None:
        """Where it raised, or was cancelled by anybody but `_end`: nobody else will bring what it was to bring."""
        cancelled = RuntimeError(f"{task.get_name()} was cancelled from within") if task.cancelled() else None
        if (error := cancelled or task.exception()) is not None and not self._ending:
            self._failure = self._failure or error
            self.gate.stop()

    async def _end(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        self._ending = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _note_progress(self, result: StepResult) -> None:
        self.progress = replace(
            self.progress,
            step=self.progress.step + 1,
            version=result.version,
            next_index=self._next_index,
            unfinished=sorted([*self._again, *self.gate.unfinished]),
            train_seconds=time.monotonic() - self._started,
        )

    async def _after_step(self) -> None:
        """Evaluation and checkpoint, when they are due. What a checkpoint holds has been logged before it exists."""
        step, best = self.progress.step, False
        if self.roles.evaluate and (step == self.config.steps or _due(step, self.eval_every)):
            best = await self._evaluate()
        if best or _due(step, self.checkpoint.every):
            await self._save()

    async def _evaluate(self) -> bool:
        """Evaluates now, leaving no trace in the engine's cache; True if it is the best so far. One as good takes
        its place where it is saved anyway, for it has learned longer."""
        assert self.roles.evaluate is not None
        started = time.monotonic()
        metrics = await self.roles.evaluate()
        await self.roles.engine.reset_cache()
        await self.roles.engine.stats()  # so that the next step's figures are its own
        self.steward.note(metrics)
        self.roles.recorder.log(self.progress.step, {**metrics, "time/eval": time.monotonic() - started})
        accuracy, best = metrics.get("eval/accuracy"), self.progress.best
        if accuracy is None:
            text = f"no accuracy: none of {metrics['eval/failed']:.0f} held-out answers could be judged"
            self.roles.recorder.event(self.progress.step, "rewards-failed", text)
            return False
        if best is None or accuracy >= best:
            self.progress = replace(self.progress, best=accuracy)
            self._best_step = self.progress.step
        return best is None or accuracy > best

    async def _save(self, *, final: bool = False) -> None:
        """A disk that is full costs a checkpoint, not the run: it goes on and tries again, unless this is the end."""
        if final and self._saved_step == self.progress.step:
            return
        best = self._best_step == self.progress.step
        self.progress = replace(self.progress, governor=self.steward.state())
        started = time.monotonic()
        try:
            await self.roles.checkpoints.save(self.progress, self.roles.learner.save, best=best)
            self._saved_step = self.progress.step
            self.roles.recorder.log(self.progress.step, {"time/save": time.monotonic() - started})
        except OSError as error:
            self.roles.recorder.event(self.progress.step, "save-failed", f"checkpoint not saved: {error}")
            if final:
                raise

    async def _log(self, result: StepResult, times: dict[str, float]) -> None:
        engine = await self.roles.engine.stats()
        tally, self._tally = self._tally, Tally()
        if tally.answers and tally.failed == tally.answers:
            text = (
                f"all {tally.failed} rewards of this step failed, nothing was learned (samples.jsonl has the reasons)"
            )
            why = tally.failure.removeprefix("failed: ")
            self.roles.recorder.event(self.progress.step, "rewards-failed", f"{text}: {why}" if why else text)
        self._idleness.note(self.progress.step, self._why_idle(result, tally))
        metrics = {**result.metrics, **tally.metrics(), **times, "time/rollout": engine["busy_seconds"]}
        busy = times["time/sync"] + times["time/audit"] + result.metrics["time/learn"] + engine["busy_seconds"]
        metrics["time/wait"] = max(0.0, times["time/total"] - busy)  # sampling and learning may overlap
        metrics["perf/preemptions"] = engine["preemptions"]
        if engine["busy_seconds"]:
            metrics["perf/rollout_tokens_per_s"] = engine["sampled_tokens"] / engine["busy_seconds"]
        if engine["prompt_tokens"]:
            metrics["perf/prefix_hit"] = engine["prefix_hit_tokens"] / engine["prompt_tokens"]
        metrics["perf/samples_per_s"] = tally.answers / times["time/total"]
        self.steward.note(metrics)
        self.roles.recorder.log(self.progress.step, metrics)

    def _why_idle(self, result: StepResult, tally: Tally) -> str | None:
        """None: the step moved the weights."""
        if result.metrics["policy/updates"]:
            return None
        nonfinite = result.metrics["policy/nonfinite"] > 0
        return tally.why_idle(nonfinite) if self._approved else "a rule of the governor asked for it"


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
