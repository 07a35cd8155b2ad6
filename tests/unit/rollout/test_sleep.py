"""An engine that sleeps gives up its memory, and after that goes on as if nothing had been."""

from __future__ import annotations

import asyncio

import pytest
import torch

from engine_support import ask, assert_scored, engine_core, finish, prompt, small
from lockstep.config import ConfigError
from lockstep.config.loading import validate
from lockstep.models.engine_view import engine_view
from lockstep.models.fused import joined_low_bit
from lockstep.models.lowbit import LowBitWeights
from lockstep.models.releasable import Releasable
from lockstep.rollout.core import EngineCore
from lockstep.rollout.engines.embedded import Embedded
from lockstep.types import Completion, Request
from lockstep.weights.memory import Memory
from mixtures import qwen3
from role_support import gaps, make_recipe, started, take_step

MODEL = small()


def requests() -> list[Request]:
    return [ask(f"r{n}", prompt(n, seed=n), 20, temperature=float(n % 2), seed=n) for n in (3, 17, 40)]


def interrupted(core: EngineCore, asked: list[Request], steps: int = 8) -> dict[str, Completion]:
    """Answered with a nap in the middle."""
    core.add(asked)
    done = [completion for _ in range(steps) for completion in core.step()]
    core.sleep()
    assert not core.busy
    core.wake()
    return {c.uid: c for c in done} | finish(core)


def bytes_of(core: EngineCore) -> int:
    tensors = [core.runner.cache.keys, core.runner.cache.values, *core.module.parameters()]
    if core.recorder is not None:
        tensors.append(core.recorder.memory.ids)
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("steps", [1, 2, 8])
def test_answers_go_on_where_they_were(steps: int) -> None:
    core = engine_core(MODEL, share=True, sleep=True, step_tokens=16, max_seqs=3)
    done = interrupted(core, requests(), steps)
    assert {uid: c.tokens for uid, c in done.items()} == {
        uid: c.tokens for uid, c in finish(engine_core(MODEL), requests()).items()
    }
    assert_scored(MODEL, requests(), done)


def test_experts_are_those_the_tokens_were_drawn_with() -> None:
    """The router is moved in between, so that whoever chose anew would choose differently."""
    mixture, request = qwen3(), ask("r", prompt(30, seed=4), 30)
    before = finish(engine_core(mixture, record=True), [request])["r"].routes
    core = engine_core(mixture, share=True, record=True, sleep=True)
    core.add([request])
    for _ in range(9):
        core.step()
    num_rows = core.scheduler.running[0].num_computed
    core.sleep()
    with torch.inference_mode():
        core.module.get_submodule("model.layers.0.mlp.gate").weight.neg_()  # type: ignore[operator]
    core.wake()
    after = finish(core)["r"].routes
    assert before is not None
    assert after is not None
    assert torch.equal(after.ids[:num_rows], before.ids[:num_rows])
    assert not torch.equal(after.ids[num_rows:], before.ids[num_rows:])


def test_memory_is_given_back_and_comes_back_empty() -> None:
    core = engine_core(qwen3(), record=True, sleep=True)
    assert core.memory is not None
    assert core.recorder is not None
    finish(core, requests())
    before = bytes_of(core)
    assert before >= core.memory.num_bytes > 0
    core.sleep()
    core.sleep()
    assert bytes_of(core) == before - core.memory.num_bytes == 0
    core.wake()
    core.wake()
    assert bytes_of(core) == before
    assert not any(t.any() for t in (core.runner.cache.keys, core.runner.cache.values, core.recorder.memory.ids))


def test_no_prefix_is_found_after_a_nap() -> None:
    core = engine_core(MODEL, share=True, sleep=True)
    finish(core, requests())
    core.sleep()
    core.wake()
    hits = core.scheduler.counters.prefix_hit_tokens
    assert_scored(MODEL, requests(), finish(core, requests()))
    assert core.scheduler.counters.prefix_hit_tokens == hits


def test_weights_of_its_own_come_back_with_the_next_update() -> None:
    core, new = engine_core(MODEL, sleep=True), small(seed=1)
    core.add(requests())
    core.step()
    core.sleep()
    with pytest.raises(RuntimeError, match="the engine sleeps: wake it before an update"):
        core.load_weights(new.state_dict())
    core.wake()
    assert not core.busy
    with pytest.raises(RuntimeError, match="gave up its weights"):
        core.operators()
    core.load_weights(MODEL.state_dict())
    assert core.busy
    assert_scored(MODEL, requests(), finish(core))


def test_an_engine_that_was_not_started_for_it_refuses() -> None:
    with pytest.raises(RuntimeError, match=r"not started with rollout\.sleep = true"):
        engine_core(MODEL).sleep()


@pytest.mark.parametrize("share", [True, False])
def test_through_the_engines_thread(share: bool) -> None:
    """Asked before, answered after; asked in between, refused. Aborted in its sleep, an answer keeps what it has."""

    async def run() -> dict[str, Completion]:
        store = Memory(snapshot=True)
        store.put(1, MODEL.state_dict())
        engine = Embedded(engine_core(MODEL, share=share, sleep=True), store=None if share else store)
        try:
            answers = asyncio.create_task(_collect(engine, [*requests(), ask("cut", prompt(9, seed=1), 100)]))
            while not (await engine.stats())["sampled_tokens"]:
                await asyncio.sleep(0.001)
            await engine.sleep()
            with pytest.raises(RuntimeError, match="the engine sleeps: wake it before a request"):
                await _collect(engine, [ask("x", (1, 2))])
            await engine.abort(["cut"])
            await engine.wake()
            if not share:
                await engine.update_weights(1)
            return await asyncio.wait_for(answers, 60)
        finally:
            await engine.close()

    done = asyncio.run(run())
    assert_scored(MODEL, requests(), done)
    assert 0 < len(done["cut"].tokens) < 100


async def _collect(engine: Embedded, asked: list[Request]) -> dict[str, Completion]:
    return {c.uid: c async for c in engine.generate(asked)}


@pytest.mark.parametrize("precision", [None, "w4a16"])
def test_roles_in_turns(precision: str | None) -> None:
    """Sampler and learner agree as before when the engine sleeps at every step."""

    async def run() -> float:
        recipe = make_recipe(precision, alignment="aligned" if precision else "none")
        recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"sleep": True})})
        async with started(recipe) as roles:
            for _ in range(2):
                await roles.engine.sleep()
                await roles.engine.wake()
                await take_step(roles)
            return float((await gaps(roles)).max())

    assert asyncio.run(run()) < 1e-4


def test_low_bit_weights_of_its_own_lie_side_by_side_after_the_move() -> None:
    recipe = make_recipe("int8_w8a8")
    assert recipe.rollout.precision is not None
    low_bit, memory = LowBitWeights(MODEL, recipe.rollout.precision), Releasable(torch.device("cpu"))
    view = engine_view(MODEL, share=False, low_bit=low_bit, memory=memory)
    attention = view.get_submodule("model.layers.0.self_attn")
    linears = [attention.get_submodule(name) for name in ("q_proj", "k_proj", "v_proj")]
    whole = joined_low_bit(linears)  # type: ignore[arg-type]
    assert whole is not None
    expected = torch.cat([low_bit.encoded[f"model.layers.0.self_attn.{n}_proj.weight"].codes for n in "qkv"])
    assert torch.equal(whole.codes, expected)
    assert all(memory.holds(tensor) for tensor in view.state_dict().values())


def test_sleep_and_staleness_are_refused_together() -> None:
    tables = make_recipe(None).model_dump(mode="json", exclude_none=True)
    tables["rollout"]["sleep"], tables["train"]["max_staleness"] = True, 1
    with pytest.raises(ConfigError, match=r"rollout.sleep = true needs train.max_staleness = 0, not 1"):
        validate(type(make_recipe(None)), tables, "test")
