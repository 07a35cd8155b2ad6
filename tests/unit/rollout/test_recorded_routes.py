"""Every answer brings the experts its tokens were computed with, whatever the engine did on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine_support import ask, assert_scored, engine_core, finish, prompt
from lockstep.config import ConfigError
from lockstep.data.chat import Conversation
from lockstep.models.loading import Loaded
from lockstep.models.routing import find_routers
from lockstep.models.tiny import byte_tokenizer
from lockstep.rollout.config import RolloutConfig
from lockstep.rollout.core import EngineCore
from lockstep.rollout.engines.embedded import Embedded
from lockstep.types import Completion, Request, Routes, Verdict
from mixtures import obeying, own_routes, qwen3, sets

VERSIONS = {version: qwen3() for version in range(2)}
with torch.no_grad():
    for parameter in VERSIONS[1].parameters():
        if parameter.ndim > 1:
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))


def routes_of(completion: Completion) -> Routes:
    assert completion.routes is not None
    return completion.routes


def expected(request: Request, completion: Completion, version: int = 0) -> Tensor:
    """What a plain forward over the whole answer chooses."""
    view, _ = obeying(VERSIONS[version])
    return sets(own_routes(view, [*request.tokens, *completion.tokens])[:-1])


def assert_routed(requests: list[Request], done: Mapping[str, Completion], version: int = 0) -> None:
    for request in requests:
        completion = done[request.uid]
        assert torch.equal(sets(routes_of(completion).ids), expected(request, completion, version))
        assert routes_of(completion).versions.tolist() == [version] * len(routes_of(completion).ids)


def mixed_requests() -> list[Request]:
    """Short and long prompts, equal ones, and two that share their beginning."""
    shared = prompt(37, seed=9)
    prompts = [prompt(n, seed=n) for n in (1, 5, 16, 17, 50)] + [shared, shared, shared[:33] + prompt(6, seed=3)]
    return [ask(f"r{i}", tokens, 24, temperature=1.0, seed=i) for i, tokens in enumerate(prompts)]


def test_versions_route_differently() -> None:
    """Otherwise the tests below would say little."""
    tokens = prompt(60, seed=1)
    first, second = (sets(own_routes(obeying(VERSIONS[v])[0], tokens)) for v in (0, 1))
    assert 0.1 < (first != second).any(-1).float().mean() < 0.9


@pytest.mark.parametrize(
    "squeeze",
    [{}, {"step_tokens": 16, "max_seqs": 3}, {"pages": 9, "max_seqs": 8, "step_tokens": 16}],
    ids=["free", "chunked", "preempted"],
)
def test_an_answer_brings_the_experts_of_all_its_tokens_but_the_last(squeeze: dict[str, int]) -> None:
    core, requests = engine_core(VERSIONS[0], record=True, **squeeze), mixed_requests()
    done = finish(core, requests)
    assert_routed(requests, done)
    assert_scored(VERSIONS[0], requests, done)
    assert (core.scheduler.counters.preemptions > 0) == ("pages" in squeeze)


def test_recording_changes_no_answer() -> None:
    requests = mixed_requests()
    recorded, plain = (finish(engine_core(VERSIONS[0], record=record), requests) for record in (True, False))
    assert {uid: (c.tokens, c.logp) for uid, c in recorded.items()} == {
        uid: (c.tokens, c.logp) for uid, c in plain.items()
    }
    assert all(c.routes is None for c in plain.values())


def test_a_prefix_hit_brings_its_routes_along() -> None:
    core, requests = engine_core(VERSIONS[0], record=True), mixed_requests()
    finish(core, requests)
    hits = core.scheduler.counters.prefix_hit_tokens
    done = finish(core, requests)
    assert core.scheduler.counters.prefix_hit_tokens > hits
    assert_routed(requests, done)


def test_pages_used_before_leave_nothing_behind() -> None:
    """Every page has held other routes by the time the second batch runs."""
    core = engine_core(VERSIONS[0], record=True, pages=12, max_seqs=3)
    finish(core, mixed_requests())
    others = [ask(f"o{n}", prompt(n, seed=100 + n), 20, temperature=1.0, seed=n) for n in (3, 30, 47)]
    assert_routed(others, finish(core, others))


def move_router(core: EngineCore) -> None:
    """Behind the engine's back: whoever chooses anew now chooses differently."""
    gate = core.module.get_submodule("model.layers.0.mlp.gate")
    with torch.inference_mode():
        gate.weight.neg_()  # type: ignore[operator]


def preempt(core: EngineCore) -> None:
    """The youngest loses its pages, as when memory runs out, and nothing of it is left in the cache."""
    core.scheduler._send_back(core.scheduler.running[-1])
    core.scheduler.forget_prefixes()


@pytest.mark.parametrize("times", [1, 2])
def test_a_preempted_answer_keeps_the_experts_it_was_drawn_with(times: int) -> None:
    """Prefilled again in chunks under the same version, even if it is preempted a second time on the way."""
    core, request = engine_core(VERSIONS[0], record=True, step_tokens=16, max_seqs=2), ask("r", prompt(40, seed=4), 30)
    reference = expected(request, finish(engine_core(VERSIONS[0]), [request])["r"])
    core.add([request])
    for _ in range(14):
        core.step()
    num_rows = core.scheduler.running[0].num_computed
    move_router(core)
    preempt(core)
    if times == 2:
        core.step()  # 16 of the rows
        assert 0 < core.scheduler.running[0].num_computed < num_rows
        preempt(core)
    done = finish(core)["r"]
    ids = sets(routes_of(done).ids)
    assert torch.equal(ids[:num_rows], reference[:num_rows])
    assert not torch.equal(ids[num_rows:, 0], expected(request, done)[num_rows:, 0])  # what is new is chosen anew
    assert set(routes_of(done).versions.tolist()) == {0}


def update(core: EngineCore, version: int, *, recompute: bool) -> None:
    core.load_weights(VERSIONS[version].state_dict())
    core.scheduler.new_version(version, recompute=recompute)


def test_with_an_update_in_flight_rows_keep_the_experts_they_were_computed_with() -> None:
    core, request = engine_core(VERSIONS[0], record=True), ask("r", prompt(20, seed=4), 30, temperature=1.0)
    core.add([request])
    for _ in range(10):
        core.step()
    update(core, 1, recompute=False)
    done = finish(core)["r"]
    routes = routes_of(done)
    before = 20 + 9  # the prompt and the tokens drawn by then, but for the last, which is computed by the new weights
    assert routes.versions.tolist() == [0] * before + [1] * (len(routes.ids) - before)
    assert [0, *done.versions[1:]] == [0, *routes.versions.tolist()[20:]]
    assert torch.equal(sets(routes.ids[:before]), expected(request, done)[:before])


@pytest.mark.parametrize("how", ["recomputed", "preempted"])
def test_what_new_weights_compute_again_is_recorded_again_and_marked(how: str) -> None:
    core, request = engine_core(VERSIONS[0], record=True), ask("r", prompt(20, seed=4), 30, temperature=1.0)
    core.add([request])
    for _ in range(10):
        core.step()
    update(core, 1, recompute=how == "recomputed")
    if how == "preempted":
        preempt(core)
    done = finish(core)["r"]
    routes = routes_of(done)
    assert set(routes.versions.tolist()) == {1}
    assert done.versions == [0] * 10 + [1] * 20
    assert torch.equal(sets(routes.ids), expected(request, done, version=1))


def test_a_later_turn_sends_only_its_new_rows() -> None:
    core, conversation = engine_core(VERSIONS[0], record=True), Conversation()
    for turn in range(3):
        conversation.observe(prompt(19, seed=turn))
        uid, routed = f"turn {turn}", conversation.num_routed
        request = Request(uid=uid, tokens=tuple(conversation.tokens), params=ask("", [], 13).params, num_routed=routed)
        done = finish(core, [request])[uid]
        assert len(routes_of(done).ids) == 32 - (turn == 0)
        conversation.sampled(done)
    whole = conversation.trajectory(uid="c", text="", verdict=Verdict(value=1.0), temperature=1.0)
    assert whole.routes is not None
    view, _ = obeying(VERSIONS[0])
    assert torch.equal(sets(whole.routes.ids), sets(own_routes(view, whole.tokens.tolist())[:-1]))
    assert core.scheduler.counters.prefix_hit_tokens > 0


def test_an_interrupted_answer_goes_on_with_all_its_routes() -> None:
    """Aborted while it runs, or while it waits to be prefilled again: what was computed is not lost."""
    core = engine_core(VERSIONS[0], record=True)
    for waiting in (False, True):
        conversation = Conversation()
        conversation.observe(prompt(21, seed=6))
        core.add([ask("r", conversation.tokens, 30)])
        for _ in range(8):
            core.step()
        if waiting:
            preempt(core)
        conversation.sampled(core.abort({"r"})[0])
        rest = ask("rest", conversation.tokens, 9)
        rest = Request(uid="rest", tokens=rest.tokens, params=rest.params, num_routed=conversation.num_routed)
        conversation.sampled(finish(core, [rest])["rest"])
        whole = conversation.trajectory(uid="c", text="", verdict=Verdict(value=1.0), temperature=1.0)
        assert whole.routes is not None
        assert whole.routes.versions.tolist() == [0] * (len(whole.tokens) - 1)
        view, _ = obeying(VERSIONS[0])
        assert torch.equal(sets(whole.routes.ids), sets(own_routes(view, whole.tokens.tolist())[:-1]))


def test_rows_that_were_never_computed_are_marked() -> None:
    core = engine_core(VERSIONS[0], record=True, step_tokens=16, max_seqs=1)
    core.add([ask("r", prompt(40, seed=6), 9)])
    core.step()
    routes = routes_of(core.abort({"r"})[0])
    assert routes.versions.tolist() == [0] * 16 + [-1] * 23
    core.add([ask("never started", prompt(5, seed=6), 9)])
    assert routes_of(core.abort({"never started"})[0]).versions.tolist() == [-1] * 4


def test_a_request_cannot_have_more_routes_than_past() -> None:
    request = ask("r", prompt(5, seed=1), 3)
    with pytest.raises(ConfigError, match="num_routed is 5 of 5 prompt tokens"):
        engine_core(VERSIONS[0]).check(Request(uid="r", tokens=request.tokens, params=request.params, num_routed=5))


def test_the_engine_in_its_thread_brings_them_too() -> None:
    module = VERSIONS[0]
    routers = find_routers(module)
    requests = mixed_requests()

    async def run(module: PreTrainedModel) -> dict[str, Completion]:
        loaded = Loaded.of(module, byte_tokenizer())
        engine = Embedded.start(loaded, RolloutConfig(max_seqs=8), None, None, routers)
        try:
            return {c.uid: c async for c in engine.generate(requests)}
        finally:
            await engine.close()

    done = asyncio.run(run(module))
    for request in requests:
        answer = done[request.uid]
        assert torch.equal(sets(routes_of(answer).ids), expected(request, answer))


def test_routes_are_part_of_the_memory_that_is_allowed() -> None:
    page_bytes = 16 * 3 * 4 * (8 + 8) * 4  # slots, layers, heads, key and value, float32
    tight = {"kv_gib": 30 * page_bytes / 2**30}
    assert engine_core(VERSIONS[0], **tight).capacity == 30 * 16
    assert engine_core(VERSIONS[0], record=True, **tight).capacity == 29 * 16


def test_rows_computed_again_by_newer_weights_keep_the_experts_these_ran_when_preempted_later() -> None:
    """An update makes all rows anew; a preemption after it, under the same version, does not undo that."""
    core = engine_core(VERSIONS[0], record=True)
    core.add([ask("r", prompt(20, seed=4), 30)])
    for _ in range(5):
        core.step()
    core.load_weights(VERSIONS[1].state_dict())
    core.scheduler.new_version(1, recompute=True)
    for _ in range(10):
        core.step()
    assert core.recorder is not None
    (seq,) = core.scheduler.running
    ran = core.recorder.memory.at(core.recorder._slots(seq, 0)).clone()
    core.module.get_submodule("model.layers.0.mlp.gate").weight.data.neg_()  # what is prefilled from now on differs
    core.scheduler._send_back(seq)
    core.scheduler.forget_prefixes()
    routes = routes_of(finish(core)["r"])
    assert torch.equal(sets(routes.ids[: len(ran)]), sets(ran))
    assert set(routes.versions.tolist()) == {1}
