"""New weights while answers are running: every token says which version drew it, and can be re-scored from that."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from engine_support import ask, assert_scored, engine_core, finish, prompt, rescore, small
from lockstep.rollout.core import EngineCore
from lockstep.types import Completion, Request

VERSIONS = {version: small(seed=version) for version in range(4)}


def weights(version: int) -> Mapping[str, Tensor]:
    return VERSIONS[version].state_dict()


def update(core: EngineCore, version: int, *, recompute: bool) -> None:
    core.load_weights(weights(version))
    core.scheduler.new_version(version, recompute=recompute)


def requests() -> list[Request]:
    return [ask(f"r{n}", prompt(n, seed=n), 20, temperature=1.0, seed=n) for n in (3, 17, 40)]


def run_with_updates(core: EngineCore, at: Mapping[int, int], *, recompute: bool) -> dict[str, Completion]:
    """`at[step] = version`: published right before that step."""
    core.add(requests())
    done: list[Completion] = []
    for step in range(200):
        if step in at:
            update(core, at[step], recompute=recompute)
        if core.busy:
            done += core.step()
    return {c.uid: c for c in done}


@torch.inference_mode()
def rescore_mixed(request: Request, completion: Completion) -> Tensor:
    """keep_kv as plain transformers would do it: one growing cache, each token by the version that drew the next."""
    cache, found = DynamicCache(), []
    steps = [list(request.tokens), *[[t] for t in completion.tokens[:-1]]]
    for tokens, version, drawn in zip(steps, completion.versions, completion.tokens, strict=True):
        out = VERSIONS[version](input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        found.append(out.logits[0, -1].log_softmax(-1)[drawn])
    return torch.stack(found)


def test_versions_differ_enough_to_tell() -> None:
    request = requests()[0]
    done = finish(engine_core(VERSIONS[0]), [request])[request.uid]
    assert (rescore(VERSIONS[0], request, done) - rescore(VERSIONS[1], request, done)).abs().max() > 0.5


@pytest.mark.parametrize("squeeze", [{}, {"step_tokens": 16, "max_seqs": 3}], ids=["free", "chunked"])
@pytest.mark.parametrize("at", [{5: 1}, {5: 1, 6: 2}, {4: 1, 9: 2, 15: 3}], ids=["once", "in-a-row", "thrice"])
def test_reprefill_scores_as_a_full_forward_of_the_new_weights(at: dict[int, int], squeeze: dict[str, int]) -> None:
    done = run_with_updates(engine_core(VERSIONS[0], **squeeze), at, recompute=True)
    for request in requests():
        completion = done[request.uid]
        assert len(set(completion.versions)) > 1
        for version in set(completion.versions):
            own = torch.tensor([v == version for v in completion.versions])
            expected = rescore(VERSIONS[version], request, completion)
            torch.testing.assert_close(torch.tensor(completion.logp)[own], expected[own], atol=1e-4, rtol=0)


@pytest.mark.parametrize("at", [{5: 1}, {5: 1, 6: 2}, {4: 1, 9: 2, 15: 3}], ids=["once", "in-a-row", "thrice"])
def test_keep_kv_scores_as_a_cache_that_mixes_versions(at: dict[int, int]) -> None:
    done = run_with_updates(engine_core(VERSIONS[0]), at, recompute=False)
    for request in requests():
        completion = done[request.uid]
        expected_versions = [max([v for step, v in at.items() if step <= i], default=0) for i in range(20)]
        assert completion.versions == expected_versions
        torch.testing.assert_close(torch.tensor(completion.logp), rescore_mixed(request, completion), atol=1e-4, rtol=0)


def test_a_request_after_the_update_sees_nothing_of_the_old_weights() -> None:
    core, request = engine_core(VERSIONS[0]), ask("again", prompt(40, seed=40), 20)
    run_with_updates(core, {5: 1}, recompute=False)
    done = finish(core, [request])
    assert set(done["again"].versions) == {1}
    assert_scored(VERSIONS[1], [request], done)


def test_an_update_while_idle() -> None:
    core, request = engine_core(VERSIONS[0]), ask("r", prompt(40, seed=1), 8)
    finish(core, [request])
    update(core, 2, recompute=False)
    done = finish(core, [request])
    assert_scored(VERSIONS[2], [request], done)


def test_preemption_after_an_update_recomputes_under_the_new_weights() -> None:
    """What is prefilled again is pure: it may be shared, and it scores as the new weights do."""
    core = engine_core(VERSIONS[0], pages=8, max_seqs=3)
    done = run_with_updates(core, {2: 1}, recompute=False)
    assert core.scheduler.counters.preemptions
    youngest = requests()[-1]
    assert set(done[youngest.uid].versions) <= {0, 1}
    again = finish(core, [ask("again", youngest.tokens, 20)])
    assert_scored(VERSIONS[1], [ask("again", youngest.tokens, 20)], again)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda w: w.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda w: w.update({"model.extra": torch.zeros(1)}), "model.extra is unknown"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(1)}), r"model.norm.weight is \(1,\), not \(32,\)"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(spoil, complaint: str) -> None:
    core, request = engine_core(VERSIONS[0]), ask("r", prompt(9, seed=1), 8)
    bad = dict(weights(1))
    spoil(bad)
    with pytest.raises(ValueError, match=complaint):
        core.load_weights(bad)
    assert_scored(VERSIONS[0], [request], finish(core, [request]))


def test_tied_weights_may_be_published_once(dense: PreTrainedModel) -> None:
    core, request = engine_core(VERSIONS[0]), ask("r", prompt(9, seed=1), 8)
    once = {name: tensor for name, tensor in weights(1).items() if name != "lm_head.weight"}
    core.load_weights(once)
    assert_scored(VERSIONS[1], [request], finish(core, [request]))
