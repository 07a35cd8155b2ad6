"""From a problem to judged groups and evaluation figures, through a real engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from transformers import PreTrainedModel

from engine_support import END, engine_core
from lockstep.bus.memory import Memory as MemoryBus
from lockstep.data.chat import render_prompt
from lockstep.models.tiny import byte_tokenizer
from lockstep.rollout.engines.embedded import Embedded
from lockstep.rollout.evaluate import EvalConfig, Evaluator
from lockstep.rollout.worker import Answerer, GroupRollout
from lockstep.types import Message, Sample, SamplingParams, StopReason, Trajectory, Verdict, negative
from lockstep.weights.memory import Memory as MemoryStore


def problem(uid: str = "train/0", text: str = "2+2") -> Sample:
    return Sample(uid=uid, messages=(Message("user", text),), answer="4")


async def judge(sample: Sample, answer: str) -> Verdict:
    """By length, so that answers differ; every fourth length fails."""
    await asyncio.sleep(0)
    if len(answer) % 4 == 3:
        return Verdict(value=None, reasons=("it broke",))
    value = float(len(answer) % 2)
    return Verdict(value=value, parts={"correct": value})


@asynccontextmanager
async def answering(module: PreTrainedModel, **params: float) -> AsyncIterator[Answerer]:
    tokenizer = byte_tokenizer()
    engine = Embedded(engine_core(module, end=(END,)), store=MemoryStore(snapshot=True))
    sampling = SamplingParams(**{"max_tokens": 10, **params})  # type: ignore[arg-type]
    try:
        yield Answerer(engine=engine, judge=judge, tokenizer=tokenizer, params=sampling, seed=0)
    finally:
        await engine.close()


def within(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 20)

    asyncio.run(limited())


def facts(answers: list[Trajectory]) -> list[tuple[str, list[int], list[float], str]]:
    return [(a.uid, a.tokens.tolist(), a.logp_behav.tolist(), a.text) for a in answers]


def test_a_group_is_complete_judged_and_on_the_bus(dense: PreTrainedModel) -> None:
    async def test() -> None:
        async with answering(dense) as answerer:
            bus = MemoryBus()
            receipt = await GroupRollout(
                answerer=answerer, bus=bus, group_size=12, context=128, train_truncated=False
            ).run(7, problem(), version=3)
            group = await bus.get(7)
            assert (group.index, group.version, group.sample) == (7, 3, problem())
            assert [t.uid for t in group.trajectories] == [f"7/{n}" for n in range(12)]
            prompt = render_prompt(answerer.tokenizer, problem().messages)
            for t in group.trajectories:
                assert t.tokens[: len(prompt)].tolist() == prompt
                assert t.mask.tolist() == [False] * len(prompt) + [True] * (len(t.tokens) - len(prompt))
                assert (t.logp_behav[t.mask] < 0).all()
                assert (t.versions[t.mask] == 0).all()
                assert (t.versions[~t.mask] == -1).all()
                assert t.truncated == (t.num_sampled == 10 and t.tokens[-1] != END)
                assert "<|end|>" not in t.text
            judged = [t.verdict.value for t in group.trajectories if t.verdict.value is not None]
            assert receipt.rewards == tuple(judged)
            assert receipt.parts == {"correct": tuple(judged)}
            assert receipt.num_failed == 12 - len(judged)
            assert receipt.num_tokens == sum(t.num_sampled for t in group.trajectories)
            assert receipt.num_truncated == sum(t.stop_reason is StopReason.LENGTH for t in group.trajectories)
            bad = [t for t in group.trajectories if t.verdict.value is not None and t.verdict.value < fmean(judged)]
            assert receipt.num_negative == len(bad) > 0
            assert any("garble" in t.flaws for t in group.trajectories), "random weights write random bytes"
            assert receipt.flaws == Counter(flaw for t in bad for flaw in t.flaws)

    within(test)


def test_a_prompt_without_room_gives_an_empty_group(dense: PreTrainedModel) -> None:
    async def test() -> None:
        async with answering(dense) as answerer:
            bus = MemoryBus()
            rollout = GroupRollout(answerer=answerer, bus=bus, group_size=4, context=128, train_truncated=False)
            receipt = await rollout.run(7, problem(text="x" * 500), version=0)
            assert receipt.too_long
            assert not receipt.has_signal
            assert (await bus.get(7)).trajectories == ()

    within(test)


def test_every_answer_has_its_own_seed_and_a_run_can_be_repeated(dense: PreTrainedModel) -> None:
    async def test() -> None:
        async with answering(dense) as answerer, answering(dense) as other:
            first = await answerer.answers("7", problem(), 8)
            assert len({tuple(a.tokens.tolist()) for a in first}) > 4
            assert facts(first) == facts(await other.answers("7", problem(), 8))
            reseeded = replace(other, seed=1)
            assert facts(first) != facts(await reseeded.answers("7", problem(), 8))
            tokens = [a.tokens.tolist() for a in await answerer.answers("8", problem(), 8)]
            assert tokens != [a.tokens.tolist() for a in first]

    within(test)


def test_cancelling_aborts_the_requests_and_the_judging(dense: PreTrainedModel) -> None:
    judging = asyncio.Event()

    async def never(sample: Sample, answer: str) -> Verdict:
        judging.set()
        await asyncio.sleep(3600)
        raise AssertionError

    async def test() -> None:
        async with answering(dense) as answerer:
            slow = replace(answerer, judge=never)
            task = asyncio.create_task(slow.answers("7", problem(), 4))
            await judging.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await answerer.engine.reset_cache()  # comes after the aborts
            assert len(asyncio.all_tasks()) <= 2  # this test and its time limit
            assert await answerer.answers("7", problem(), 1)

    within(test)


def test_evaluation_is_greedy_and_counts_failures_nowhere(dense: PreTrainedModel) -> None:
    samples = [problem(f"eval/{i}", f"{i}*{i}") for i in range(12)]

    async def test() -> None:
        async with answering(dense, temperature=0.7, top_k=3) as answerer:
            seen: list[Trajectory] = []
            evaluator = Evaluator(answerer=answerer, samples=samples, config=EvalConfig(k=6))
            metrics = await evaluator.run(lambda sample, answer: seen.append(answer))
            values = [a.verdict.value for a in seen]
            judged = [v for v in values if v is not None]
            assert metrics["eval/failed"] == values.count(None)
            assert metrics["eval/accuracy"] == sum(judged) / len(judged)
            assert metrics["eval/length"] == sum(a.num_sampled for a in seen) / 12
            assert metrics["eval/truncated"] == sum(a.truncated for a in seen) / 12
            assert 0 < metrics["eval/avg_at_k"] < metrics["eval/pass_at_k"] <= 1
            again = await replace(evaluator, answerer=replace(answerer, seed=5), config=EvalConfig()).run()
            assert again == {name: metrics[name] for name in again}  # greedy: the seed does not matter
            assert "eval/avg_at_k" not in again

    within(test)


def test_accuracy_does_not_depend_on_weights(dense: PreTrainedModel) -> None:
    async def weighted(sample: Sample, answer: str) -> Verdict:
        return Verdict(value=0.9, parts={"correct": 0.9, "format": 0.0}, correct=True)

    async def test() -> None:
        async with answering(dense) as answerer:
            right = replace(answerer, judge=weighted)
            metrics = await Evaluator(answerer=right, samples=[problem()], config=EvalConfig(k=2)).run()
            assert metrics["eval/accuracy"] == metrics["eval/avg_at_k"] == metrics["eval/pass_at_k"] == 1.0

    within(test)


def test_answers_that_nobody_could_judge_have_no_accuracy(dense: PreTrainedModel) -> None:
    async def broken(sample: Sample, answer: str) -> Verdict:
        return Verdict(value=None)

    async def test() -> None:
        async with answering(dense) as answerer:
            evaluator = Evaluator(answerer=replace(answerer, judge=broken), samples=[problem()], config=EvalConfig(k=2))
            metrics = await evaluator.run()
            assert metrics.keys() == {"eval/length", "eval/truncated", "eval/failed"}
            assert metrics["eval/failed"] == 1

    within(test)


def test_an_evaluation_that_fails_leaves_nothing_running(dense: PreTrainedModel) -> None:
    samples = [problem(f"eval/{i}") for i in range(4)] + [problem("eval/long", "x" * 500)]

    async def test() -> None:
        async with answering(dense) as answerer:
            with pytest.raises(ValueError, match=r"'eval/eval/long/0': 50[0-9] prompt tokens leave no room"):
                await Evaluator(answerer=answerer, samples=samples, config=EvalConfig()).run()
            await asyncio.sleep(0)
            await answerer.engine.reset_cache()
            assert len(asyncio.all_tasks()) <= 2

    within(test)


def test_no_samples_no_division_by_zero(dense: PreTrainedModel) -> None:
    async def test() -> None:
        async with answering(dense) as answerer:
            metrics = await Evaluator(answerer=answerer, samples=[], config=EvalConfig(k=2)).run()
            assert set(metrics.values()) == {0.0}

    within(test)


def test_the_bus_hands_a_group_over_once(dense: PreTrainedModel) -> None:
    async def test() -> None:
        async with answering(dense) as answerer:
            bus = MemoryBus()
            rollout = GroupRollout(answerer=answerer, bus=bus, group_size=1, context=128, train_truncated=False)
            for index in (1, 2):
                await rollout.run(index, problem(), 0)
            await bus.drop(2)
            await bus.drop(2)
            await bus.get(1)
            for index in (1, 2):
                with pytest.raises(KeyError):
                    await bus.get(index)

    within(test)


@pytest.mark.parametrize("snapshot", [True, False])
def test_the_store_holds_the_newest_version(snapshot: bool) -> None:
    store, weights = MemoryStore(snapshot=snapshot), {"w": torch.zeros(2)}
    with pytest.raises(LookupError, match="weight version 0 is not held"):
        store.get(0)
    store.put(3, weights)
    weights["w"] += 1  # the learner goes on
    assert store.get(3)["w"].tolist() == ([0.0, 0.0] if snapshot else [1.0, 1.0])
    held = store.get(3)["w"].data_ptr()
    store.put(4, weights)
    assert store.get(4)["w"].tolist() == [1.0, 1.0]
    assert store.get(4)["w"].data_ptr() == held  # the same buffers: memory does not grow
    with pytest.raises(LookupError, match="weight version 3 is not held; held: 4"):
        store.get(3)


@pytest.mark.parametrize(
    ("rewards", "below"),
    [([1.0, 0.0, 0.0], [1, 2]), ([0.1] * 7, []), ([None, None], []), ([None, 0.3, 0.1], [2]), ([], [])],
)
def test_negative_answers_are_those_below_their_groups_mean(rewards: list[float | None], below: list[int]) -> None:
    empty = torch.zeros(0)
    answers = [
        Trajectory(
            uid=str(n),
            tokens=empty,
            mask=empty,
            logp_behav=empty,
            versions=empty,
            temperature=1.0,
            stop_reason=StopReason.EOS,
            verdict=Verdict(value=reward),
            text="",
        )
        for n, reward in enumerate(rewards)
    ]
    assert [int(answer.uid) for answer in negative(answers)] == below
