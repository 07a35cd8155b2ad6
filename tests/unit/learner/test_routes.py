"""Expert routes in the learner: replayed in every pass of a step, refused when they cannot be true."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from making import ROUTERS, make_checkpoint, make_core, make_group, routed, run_step
from torch import Tensor

from lockstep.algorithms.diagnostics import Tally, tally_routing
from lockstep.algorithms.diagnostics.routing import load_drift, routing_metrics
from lockstep.data.packing import collate, row_of
from lockstep.learner import scoring
from lockstep.learner.passes import Replayed
from lockstep.learner.step import LearnerCore
from lockstep.models.routes import Replay
from lockstep.types import Group, Routes

SEVERAL = {"mini_steps": 2, "micro_tokens": 60}
GRPO = {"surrogate": "grpo"}


def groups(num: int = 2) -> list[Group]:
    return [routed(make_group(i, (1.0, 0.0, 0.5, 0.0)), seed=i) for i in range(num)]


def core(learner: dict[str, Any] | None = None, **settings: Any) -> LearnerCore:
    return make_core(GRPO, learner, experts=True, obeying=True, **settings)


def change(group: Group, edit: Callable[[Routes], Routes]) -> Group:
    """In the first answer."""
    first, *rest = group.trajectories
    assert first.routes is not None
    return replace(group, trajectories=(replace(first, routes=edit(first.routes)), *rest))


def with_ids(edit: Callable[[Tensor], Any]) -> Callable[[Routes], Routes]:
    def run(routes: Routes) -> Routes:
        ids = routes.ids.clone()
        edit(ids)
        return Routes(ids, routes.versions)

    return run


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda r: Routes(r.ids[1:], r.versions[1:]), r"rows for \d+ tokens, of which all but the last have one"),
        (lambda r: Routes(r.ids[:, :1], r.versions), r"\[1, 2\] ids per token, the model has \[2, 2\]"),
        (
            lambda r: Routes(r.ids.to(torch.int16), r.versions),
            "ids are of torch.int16, not of torch.uint8, as those of 4 experts are",
        ),
        (lambda r: Routes(r.ids.float() + 0.5, r.versions), "of torch.float32, not"),
        (lambda r: Routes(r.ids[0, 0, 0], r.versions), r"ids are \[\], not \[rows, layers, top-k\]"),
        (lambda r: Routes(r.ids, r.versions[1:]), r"\d+ versions for \d+ rows of ids: each has one"),
        (lambda r: Routes(r.ids, r.versions.float()), "versions are .* of torch.float32, not a whole number"),
        (lambda r: Routes(r.ids, r.versions[None]), r"versions are \[1, \d+\] of torch.int32, not"),
        (with_ids(lambda ids: ids[3].fill_(0)), "a router chose an expert twice, as in memory that was never written"),
        (with_ids(lambda ids: ids[0, 1].copy_(torch.tensor([2, 2]))), "a router chose an expert twice"),
        (with_ids(lambda ids: ids[-1, 0, 1].fill_(4)), "expert 4 of 4: the ids overflowed their type"),
    ],
    ids=[
        "too few",
        "other layers",
        "other type",
        "fractions",
        "one id",
        "too few versions",
        "versions of another type",
        "versions of another shape",
        "zeros",
        "twice",
        "out of range",
    ],
)
def test_routes_that_cannot_be_true_stop_the_run(edit: Callable[[Routes], Any], reason: str) -> None:
    learner = core()
    learner.begin(0)
    with pytest.raises(ValueError, match=reason) as caught:
        learner.accumulate([change(groups()[0], edit)])
    assert "the expert routes of answer '0/0' are wrong" in str(caught.value)


def without_routes(group: Group) -> Group:
    return replace(group, trajectories=tuple(replace(t, routes=None) for t in group.trajectories))


@pytest.mark.parametrize("routing", ["off", "r2", "r3"])
@pytest.mark.parametrize("bare", [0, 1])
def test_answers_without_routes_among_others_that_have_them_stop_the_run(routing: str, bare: int) -> None:
    """Whichever come first, in a group or in another one."""
    learner, given = core({"routing": routing}), groups()
    first, *rest = given[bare].trajectories
    given[bare] = replace(given[bare], trajectories=(replace(first, routes=None), *rest))
    learner.begin(0)
    with pytest.raises(
        ValueError, match=f"answer '{bare}/0' has no expert routes, but answer '0/{1 - bare}' of the sa"
    ):
        learner.accumulate(given)


def test_replay_without_any_routes_stops_the_run() -> None:
    learner = core()
    learner.begin(0)
    with pytest.raises(ValueError, match="'0/0' are wrong: no answer so far has any, so the engine does not record"):
        learner.accumulate([without_routes(group) for group in groups()])


def test_the_answer_that_is_wrong_is_named() -> None:
    """They are looked at together."""
    learner, group = core(), groups()[0]
    learner.begin(0)
    *rest, last = group.trajectories
    broken = change(replace(group, trajectories=(last,)), with_ids(lambda ids: ids[0].fill_(1))).trajectories
    with pytest.raises(ValueError, match="answer '0/3' are wrong: a router chose an expert twice"):
        learner.accumulate([replace(group, trajectories=(*rest, *broken))])


def test_routes_that_nobody_reads_are_not_dropped_in_silence() -> None:
    learner = make_core(GRPO, experts=True)
    learner.begin(0)
    with pytest.raises(ValueError, match="answer '0/0' brings expert routes, which this learner does not read"):
        learner.accumulate(groups())


def weights_after(learner: LearnerCore, steps: int = 2) -> tuple[dict[str, Tensor], dict[str, float]]:
    metrics: dict[str, float] = {}
    for _ in range(steps):
        metrics = run_step(learner, groups())
    return {name: tensor.detach().clone() for name, tensor in learner.weights().items()}, metrics


@pytest.mark.parametrize("updates", [{}, SEVERAL], ids=["streamed", "replayed"])
def test_recomputed_activations_go_to_the_same_experts(updates: dict[str, int]) -> None:
    held, metrics = weights_after(core(updates))
    again, _ = weights_after(core({**updates, "activation_checkpointing": True}))
    assert metrics["routing/differ"] > 0.5  # they are random, so no router would have chosen so itself
    for name in held:
        torch.testing.assert_close(again[name], held[name], rtol=1e-5, atol=1e-7)


def test_what_is_replayed_is_what_is_learned() -> None:
    replayed, _ = weights_after(core())
    plain = make_core(GRPO, experts=True)
    for _ in range(2):
        run_step(plain, [make_group(i, (1.0, 0.0, 0.5, 0.0)) for i in range(2)])
    assert any(not torch.allclose(replayed[name], tensor) for name, tensor in plain.weights().items())


def told(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every forward to come, whether it is told its experts."""
    calls: list[bool] = []

    def replay(routers: Any, ids: Tensor | None = None, known: Tensor | None = None, follow: bool = True) -> Replay:
        calls.append(follow and ids is not None and known is not None and bool(known.any()))
        return Replay(routers, ids, known, follow=follow)

    monkeypatch.setattr(scoring, "Replay", replay)
    return calls


def test_r2_replays_in_the_updates_what_was_chosen_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, calls = core({**SEVERAL, "routing": "r2"}), told(monkeypatch)
    metrics = run_step(learner, [make_group(0, (1.0, 0.0, 0.5, 0.0))])
    num_frozen = calls.index(True)
    assert num_frozen >= 1
    assert all(calls[num_frozen:])
    rows = frozen_rows(learner)
    assert all(row.routes is not None and row.routed is not None and row.routed.all() for row in rows)
    assert "routing/differ" not in metrics  # there is nothing of the sampler's to compare with
    assert 0 < metrics["routing/load_entropy"] <= 1


@pytest.mark.parametrize("updates", [{}, SEVERAL], ids=["streamed", "replayed"])
@pytest.mark.parametrize("routing", ["off", "r2"])
def test_what_is_not_replayed_is_compared_all_the_same(routing: str, updates: dict[str, int]) -> None:
    """The sampler's experts change nothing of what is learned; how many differ is logged in every mode."""
    told, metrics = weights_after(core({**updates, "routing": routing}))
    plain = core({**updates, "routing": routing})
    for _ in range(2):
        run_step(plain, [make_group(i, (1.0, 0.0, 0.5, 0.0)) for i in range(2)])
    for name, tensor in plain.weights().items():
        torch.testing.assert_close(told[name], tensor, rtol=1e-5, atol=1e-7)
    assert metrics["routing/differ"] > 0.5
    assert metrics["routing/missing"] == 0
    assert 0 < metrics["routing/load_entropy"] <= 1


def test_with_routing_off_every_update_chooses_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, calls = core({**SEVERAL, "routing": "off"}), told(monkeypatch)
    run_step(learner, groups())
    assert calls
    assert not any(calls)


def frozen_rows(learner: LearnerCore) -> list[Any]:
    assert isinstance(learner._pass, Replayed)
    return learner._pass._rows


def test_missing_rows_are_counted_and_chosen_once_for_all_updates() -> None:
    learner = core(SEVERAL)

    def lose(routes: Routes) -> Routes:
        return Routes(routes.ids, torch.where(torch.arange(len(routes.ids)) == 2, -1, routes.versions).int())

    given = [change(groups()[0], lose)]
    metrics = run_step(learner, given)
    assert metrics["routing/missing"] == 1
    first, routes = frozen_rows(learner)[0], given[0].trajectories[0].routes
    assert routes is not None
    assert first.routed.all()
    kept = torch.arange(len(routes.ids)) != 2
    assert torch.equal(first.routes[:-1][kept], routes.ids[kept])
    assert first.routes[2].unique(dim=-1).shape[-1] == ROUTERS.top_k


def test_rows_computed_again_by_newer_weights_are_counted() -> None:
    learner, given = core(), groups()[0]
    given = change(given, lambda routes: Routes(routes.ids, routes.versions + 1))
    first = given.trajectories[0]
    assert run_step(learner, [given], version=1)["routing/rerecorded"] == first.num_sampled


def test_the_reference_keeps_its_own_routing(tmp_path: Path) -> None:
    learner = make_core(GRPO | {"kl": {"coef": 0.5}}, experts=True, obeying=True)
    learner.load_reference(make_checkpoint(tmp_path / "reference", experts=True))
    reference = learner.updater.reference
    assert reference is not None
    batch = collate([row_of(t, 0) for t in groups()[0].trajectories])
    live = replace(batch, routes=None, routed=None, shared=None)
    torch.testing.assert_close(reference.logp(batch), reference.logp(live))
    with torch.no_grad():
        scored = learner.updater.score([row_of(t, 0) for t in groups()[0].trajectories])[1]
    assert (scored.logp - reference.logp(batch)).abs().max() > 1e-3  # the learner, of the same weights, replays


def test_disagreement_is_averaged_per_sequence_and_the_load_counts_forwarded_tokens() -> None:
    batch = collate([row_of(t, 0) for t in groups(1)[0].trajectories[:2]])
    lengths = batch.cu_seqlens.diff().tolist()
    assert batch.routes is not None
    differ = torch.zeros(len(batch.tokens), 2, dtype=torch.bool)
    differ[0, 0] = differ[1, 0] = differ[1, 1] = True  # in the first sequence
    differ[lengths[0] - 1] = True  # its last token, which the sampler never forwarded
    tally = Tally()
    tally_routing(tally, batch, differ, batch.routes, ROUTERS.num_experts)
    found = routing_metrics(tally.sums)
    rows = lengths[0] - 1
    assert found["routing/differ/moe0"] == pytest.approx(2 / rows / 2)
    assert found["routing/differ/moe1"] == pytest.approx(1 / rows / 2)
    assert found["routing/differ"] == pytest.approx(1.5 / rows / 2)
    assert found["routing/differ_per_token"] == pytest.approx(3 / rows / 2)
    assert found["routing/differ_tokens"] == pytest.approx(2 / rows / 2)
    load = tally.sums["expert_load"]
    assert load.sum(1).tolist() == [2 * (sum(lengths) - 2)] * 2
    assert load[1, 3] == sum(int((t.routes.ids[:, 1] == 3).sum()) for t in groups(1)[0].trajectories[:2] if t.routes)


def test_load_drift_is_the_share_that_went_elsewhere() -> None:
    assert load_drift(torch.tensor([[5.0, 5.0, 0.0]]), torch.tensor([[5.0, 0.0, 5.0]])) == pytest.approx(0.5)
    assert load_drift(torch.tensor([[2.0, 2.0]]), torch.tensor([[9.0, 9.0]])) == 0


def test_drift_is_from_the_first_step_of_the_run_also_after_a_resume(tmp_path: Path) -> None:
    learner = core()
    assert run_step(learner, groups())["routing/load_drift"] == 0
    learner.save(tmp_path)
    other = [routed(make_group(7, (1.0, 0.0, 0.5, 0.0)), seed=70)]
    resumed = core()
    resumed.load(tmp_path)
    assert run_step(resumed, other)["routing/load_drift"] == run_step(learner, other)["routing/load_drift"] > 0
