"""Bursts of decode steps on a CPU: the code that runs as CUDA graphs on a GPU, step by step.

A capture, which a GPU makes when a kind of step is first asked for, overwrites the state; it does so here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine_support import ask, engine_core, finish, prompt, rescore, small
from lockstep.rollout.burst import Burst, Kind
from lockstep.rollout.core import EngineCore
from lockstep.types import Completion, Request, StopReason

AHEAD = 8  # steps in a row


class Captured(Burst):
    def _graph(self, kind: Kind) -> None:
        if kind not in self._graphs:
            self._graphs[kind] = None  # type: ignore[assignment]
            self._state.zero_()
            self._state[0] = self.rows.nobody
            self._run_step(kind)


def in_bursts(module: PreTrainedModel, *, end: Sequence[int] = (), **config: Any) -> EngineCore:
    """An engine that goes on in bursts, also when few are left and many have ended."""
    core = engine_core(module, end=end, **config)
    memory = core.recorder.memory if core.recorder is not None else None
    core.runner.burst = Captured(core.module, core.runner.cache, core.rows, end, memory)
    core.scheduler.run_ahead, core.scheduler.follow_from, core.scheduler.idle_share = AHEAD, 2, 0.5
    return core


def worst(module: PreTrainedModel, requests: Sequence[Request], done: dict[str, Completion]) -> float:
    pairs = ((rescore(module, r, done[r.uid]), torch.tensor(done[r.uid].logp)) for r in requests if done[r.uid].tokens)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize(
    ("max_seqs", "pages", "step_tokens"),
    [(24, None, 2048), (10, None, 2048), (24, 60, 2048), (24, None, 50), (24, 60, 50)],
)
def test_groups_of_answers(dense: PreTrainedModel, max_seqs: int, pages: int | None, step_tokens: int) -> None:
    """All at once, more than there are rows, with too few pages, and with prompts that take several steps."""
    requests = [
        ask(f"{p}-{i}", prompt(37, p), 5 if i < 2 else 60, temperature=1.0, seed=i) for p in range(4) for i in range(6)
    ]
    core = in_bursts(dense, max_seqs=max_seqs, pages=pages, step_tokens=step_tokens)
    done = finish(core, requests)
    assert worst(dense, requests, done) < 1e-4
    assert [len(done[r.uid].tokens) for r in requests] == [r.params.max_tokens for r in requests]
    assert core.scheduler.pool.num_available == core.scheduler.pool.num_pages


def test_short_prompts_one_of_them_truncated(dense: PreTrainedModel) -> None:
    requests = [ask(f"{i}", prompt(6, i), 40, temperature=1.0, seed=i, top_p=0.9 if i == 0 else 1.0) for i in range(4)]
    done = finish(in_bursts(dense, max_seqs=4), requests)
    assert worst(dense, requests[1:], done) < 1e-4


def test_what_the_host_ends_leaves_the_others_alone(dense: PreTrainedModel) -> None:
    """Stop strings and aborts in the middle of bursts: their pages go to others while the device is on its way."""
    plain = [ask(f"{i}", prompt(9, i), 60, temperature=1.0, seed=i) for i in range(12)]
    single = finish(engine_core(dense, max_seqs=12), plain)
    core = in_bursts(dense, max_seqs=12, pages=70)
    text = [core.tokenizer.decode(single[r.uid].tokens[20 + i : 22 + i]) for i, r in enumerate(plain)]
    requests = [
        ask(r.uid, r.tokens, 60, temperature=1.0, seed=r.params.seed, stop=(text[i],) if i in (3, 7) else ())
        for i, r in enumerate(plain)
    ]
    core.add(requests)
    done: list[Completion] = []
    for step in range(200):
        if step == 4:
            done += core.abort({"5"})
        if core.busy:
            done += core.step()
    found = {c.uid: c for c in done}
    assert len(found) == len(requests)
    assert [found[uid].stop_reason for uid in ("3", "5", "7")] == [StopReason.STOP, StopReason.ABORTED, StopReason.STOP]
    assert worst(dense, requests, found) < 1e-4
    assert all(found[r.uid].tokens == single[r.uid].tokens for r in requests if r.uid not in ("3", "5", "7"))


@pytest.mark.parametrize(("step_tokens", "update_after"), [(2048, 3), (16, 1)])
def test_new_weights_while_more_is_under_way(step_tokens: int, update_after: int) -> None:
    """A burst, or a step of prompts, launched under old weights is of the old version, whatever came before it was
    taken in."""
    versions = [small(seed=seed) for seed in (1, 2)]
    core = in_bursts(versions[0], max_seqs=4, step_tokens=step_tokens)
    requests = [ask(f"{i}", prompt(10, i), 40, temperature=1.0, seed=i) for i in range(4)]
    core.add(requests)
    done: list[Completion] = []
    for step in range(100):
        if step == update_after:
            assert core._ahead is not None
            core.load_weights(versions[1].state_dict())
            core.scheduler.new_version(1, recompute=True)
        if core.busy:
            done += core.step()
    assert len(done) == 4
    assert {version for completion in done for version in completion.versions} == {0, 1}
    for completion in done:
        request = requests[int(completion.uid)]
        first = completion.versions.index(1)
        old, new = (rescore(module, request, completion) for module in versions)
        expected = torch.cat([old[:first], new[first:]])
        assert (expected - torch.tensor(completion.logp)).abs().max() < 1e-4


def test_experts_are_those_of_single_steps(mixture: PreTrainedModel) -> None:
    requests = [ask(f"{p}-{i}", prompt(20, p), 30, temperature=1.0, seed=i) for p in range(2) for i in range(4)]
    single = finish(engine_core(mixture, max_seqs=8, record=True), requests)
    done = finish(in_bursts(mixture, max_seqs=8, record=True), requests)
    for uid, expected in single.items():
        found = done[uid]
        assert found.tokens == expected.tokens
        assert found.routes is not None
        assert expected.routes is not None
        assert torch.equal(found.routes.ids, expected.routes.ids)
