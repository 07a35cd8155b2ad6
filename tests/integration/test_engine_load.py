"""The engine under load loses nothing: thousands of requests of random lengths, stops, aborts, weight updates and too
few pages; every log-prob is that of a full forward of the version that drew the token, and memory does not grow.

Runs on a GPU where there is one. `pytest -m slow tests/integration/test_engine_load.py` is the whole of it.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import psutil
import pytest
import torch
from transformers import PreTrainedModel

from engine_support import engine_core, finish, prompt, rescore, sharpen
from lockstep.models.exact import make_exact
from lockstep.models.lowbit import LowBitWeights
from lockstep.models.tiny import TinyModel, tiny_model
from lockstep.rollout.config import RolloutConfig
from lockstep.rollout.core import EngineCore
from lockstep.rollout.engines.embedded import Embedded
from lockstep.rollout.sequence import Sequence
from lockstep.types import Completion, Request, SamplingParams, StopReason
from lockstep.weights.memory import Memory

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_VERSIONS, CLIENTS, PAGES, ROWS = 3, 12, 32, 16
MOST_GROWN_MIB = 64  # with thousands of answers that the test keeps
BOUND = 2e-3  # nats, float32: the largest seen is a tenth of it


def module(seed: int) -> PreTrainedModel:
    return sharpen(tiny_model(TinyModel(hidden=64, layers=2, heads=4, context=128), seed), seed)


@dataclass
class Load:
    """Clients that ask one after the other, and what came of it."""

    versions: Seq[PreTrainedModel]
    engine: Embedded
    store: Memory
    rng: random.Random
    asked: dict[str, Request] = field(default_factory=dict)
    answered: dict[str, Completion] = field(default_factory=dict)
    abandoned: set[str] = field(default_factory=set)
    version: int = 0
    # process and device, from a tenth of the load to its end
    grown_mib: tuple[float, float] = (0.0, 0.0)

    def request(self, uid: str) -> Request:
        """One prompt in three is another's: shared pages. One in four ends by a string or a token of its own."""
        rng = self.rng
        seed = rng.randrange(20) if rng.random() < 0.3 else rng.randrange(10**6)
        stops = rng.choice([{}, {}, {}, {"stop": ("a",)}, {"stop_tokens": (rng.randrange(256),)}])
        params = SamplingParams(
            max_tokens=rng.choice([1, 2, 7, 20, 60]),
            temperature=rng.choice([0.0, 1.0, 1.0]),
            seed=rng.randrange(10**6),
            **stops,
        )
        return Request(uid=uid, tokens=prompt(rng.choice([1, 5, 16, 17, 40]), seed), params=params)

    async def client(self, name: int, batches: range) -> None:
        for batch in batches:
            requests = [self.request(f"{name}/{batch}/{n}") for n in range(self.rng.randint(1, 6))]
            self.asked |= {r.uid: r for r in requests}
            fate = self.rng.random()
            if fate < 0.1:
                asyncio.get_running_loop().call_later(
                    self.rng.random() / 50, lambda r=requests: asyncio.ensure_future(self.engine.abort([r[0].uid]))
                )
            async for completion in self.engine.generate(requests):
                assert completion.uid not in self.answered, "answered twice"
                self.answered[completion.uid] = completion
                if fate > 0.95:  # the caller goes away in the middle
                    self.abandoned |= {r.uid for r in requests} - self.answered.keys()
                    break

    async def updates(self) -> None:
        while True:
            await asyncio.sleep(self.rng.random() / 10)
            self.version += 1
            self.store.put(self.version, self.versions[self.version % NUM_VERSIONS].state_dict())
            await self.engine.update_weights(self.version)

    async def run(self, num_batches: int, *, updates: bool) -> None:
        updating = asyncio.create_task(self.updates()) if updates else None
        tenth = -(-num_batches // 10)
        await asyncio.gather(*(self.client(n, range(tenth)) for n in range(CLIENTS)))
        before = memory_mib()
        await asyncio.gather(*(self.client(n, range(tenth, num_batches)) for n in range(CLIENTS)))
        process, device = memory_mib()
        self.grown_mib = process - before[0], device - before[1]
        if updating is not None:
            updating.cancel()

    def worst_difference(self) -> float:
        """Between the log-probs returned and those of the version that drew each token."""
        worst = 0.0
        for uid, completion in self.answered.items():
            logp, drawn_by = torch.tensor(completion.logp), torch.tensor(completion.versions)
            for version in set(completion.versions):
                own = drawn_by == version
                found = rescore(self.versions[version % NUM_VERSIONS], self.asked[uid], completion)
                worst = max(worst, float((logp - found)[own].abs().max()))
        return worst


def memory_mib() -> tuple[float, float]:
    """What the process has, and what it has on the device."""
    device = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
    return psutil.Process().memory_info().rss / 2**20, device / 2**20


def under_load(num_batches: int, *, updates: bool, seed: int) -> Load:
    versions = [module(seed) for seed in range(NUM_VERSIONS)]
    core = engine_core(copy.deepcopy(versions[0]).to(DEVICE), pages=PAGES, max_seqs=ROWS, step_tokens=64)
    return load_engine(core, versions, num_batches, updates=updates, seed=seed)


def load_engine(
    core: EngineCore, versions: Seq[PreTrainedModel], num_batches: int, *, updates: bool, seed: int
) -> Load:
    """Which has PAGES pages and ROWS rows."""
    store = Memory(snapshot=True)
    store.put(0, versions[0].state_dict())

    async def run() -> Load:
        engine = Embedded(core, store=store, update="reprefill")
        load = Load(versions, engine, store, random.Random(seed))
        await asyncio.wait_for(load.run(num_batches, updates=updates), 600)
        await engine.reset_cache()
        await engine.close()
        return load

    load = asyncio.run(run())
    scheduler = core.scheduler
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.pool.num_available == PAGES, "pages are lost"
    assert sorted(scheduler._rows) == list(range(ROWS)), "rows are lost"
    assert not load.engine._outboxes
    assert not load.engine._uids
    assert scheduler.counters.preemptions > 0, "there were pages enough: this was no load"
    gc.collect()
    kept = [o.request.uid for o in gc.get_objects() if type(o) is Sequence]
    assert not load.asked.keys() & kept, "requests that have ended"
    assert load.grown_mib[0] < MOST_GROWN_MIB
    assert load.grown_mib[1] < 1
    return load


def check(load: Load) -> None:
    assert load.asked.keys() == load.answered.keys() | load.abandoned
    for uid, completion in load.answered.items():
        params = load.asked[uid].params
        assert len(completion.tokens) == len(completion.logp) == len(completion.versions)
        if completion.stop_reason is StopReason.LENGTH:
            assert len(completion.tokens) == params.max_tokens
        elif completion.stop_reason is StopReason.EOS:
            assert completion.tokens[-1] in params.stop_tokens
    assert load.worst_difference() < BOUND


@pytest.mark.parametrize("updates", [False, True])
def test_nothing_is_lost(updates: bool) -> None:
    load = under_load(5, updates=updates, seed=3)
    check(load)
    assert (load.version > 0) == updates


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_is_lost_of_five_thousand() -> None:
    load = under_load(130, updates=True, seed=4)
    assert len(load.asked) >= 5000
    check(load)
    process, device = load.grown_mib
    grown = f"{process:.1f} MiB more in the process, {device:.1f} on the device"
    worst = f"worst |log-prob difference| {load.worst_difference():.2e}"
    print(f"{len(load.asked)} requests, {load.version} updates, {worst}, {grown}")


def test_answers_do_not_depend_on_the_load() -> None:
    """Without updates, greedy or seeded, they are those of an engine that has one request at a time."""
    load = under_load(3, updates=False, seed=5)
    core = engine_core(copy.deepcopy(load.versions[0]).to(DEVICE))
    for uid, completion in whole(load).items():
        assert finish(core, [load.asked[uid]])[uid].tokens == completion.tokens


def whole(load: Load) -> dict[str, Completion]:
    """The answers that nobody ended early."""
    return {uid: c for uid, c in load.answered.items() if c.stop_reason is not StopReason.ABORTED}


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("num_batches", [5, pytest.param(130, marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", ["int8_w8a8", {"name": "w4a8", "inputs": "fp8"}])
def test_exact_answers_are_bit_for_bit_those_of_one_at_a_time(precision: object, num_batches: int) -> None:
    """`rollout.exact`, in bfloat16: not only the tokens, every log-prob."""
    config = RolloutConfig.model_validate({"precision": precision, "exact": True})
    assert config.precision is not None
    shape = TinyModel(hidden=256, layers=3, heads=4, context=128)
    model = sharpen(tiny_model(shape, 0), 0, std=0.1).to(DEVICE, torch.bfloat16)
    make_exact(model)

    def core(**options: int) -> EngineCore:
        low_bit = LowBitWeights(model, config.precision)  # type: ignore[arg-type]
        return engine_core(model, low_bit=low_bit, share=True, precision=config.precision, exact=True, **options)

    loaded = core(pages=PAGES, max_seqs=ROWS, step_tokens=64)
    load = load_engine(loaded, [model], num_batches, updates=False, seed=6)
    one_at_a_time = core()
    for uid, completion in whole(load).items():
        alone = finish(one_at_a_time, [load.asked[uid]])[uid]
        assert (alone.tokens, alone.logp) == (completion.tokens, completion.logp)
    print(f"{len(load.asked)} requests, {len(whole(load))} answers as they are one at a time")
