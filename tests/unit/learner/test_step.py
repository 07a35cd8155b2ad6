"""The learner's step: exact accumulation, who is left out, skipped updates, resume."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from making import make_core, make_group, make_groups, make_trajectory, run_step
from torch import Tensor

from lockstep.config import ConfigError
from lockstep.learner.local import LocalLearner
from lockstep.learner.step import LearnerCore
from lockstep.metrics import describe
from lockstep.types import Group, StopReason

DAPO = {"surrogate": "dapo"}
ALGORITHMS = {"dapo": DAPO, "grpo": {"surrogate": "grpo"}, "ppo": {"surrogate": "ppo"}}


def snapshot(core: LearnerCore) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in core.weights().items()}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def close(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("learner", [{}, {"mini_steps": 2, "epochs": 2}], ids=["one update", "four updates"])
def test_a_step_learns_and_logs_only_documented_names(algorithm: str, learner: dict[str, int]) -> None:
    core = make_core(ALGORITHMS[algorithm], learner)
    before = snapshot(core)
    metrics = run_step(core, make_groups())
    assert not same(before, core.weights())
    assert [name for name in metrics if describe(name) is None] == []
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["policy/skipped"] == 0
    assert (metrics["policy/clip_high"] > 0) == bool(learner), "ratios leave the band only after a first update"


@pytest.mark.parametrize("reduction", ["token_mean", "seq_mean", "seq_mean_token_sum", "token_sum_norm"])
@pytest.mark.parametrize("learner", [{}, {"mini_steps": 2}], ids=["streamed", "replayed"])
def test_micro_batches_add_up_to_the_whole_batch(reduction: str, learner: dict[str, int]) -> None:
    whole, parts = (make_core(DAPO | {"reduction": reduction}, learner | {"micro_tokens": n}) for n in (100_000, 24))
    a, b = run_step(whole, make_groups()), run_step(parts, make_groups())
    assert a["policy/loss"] == pytest.approx(b["policy/loss"], rel=1e-5, abs=1e-7)
    assert a["policy/grad_norm"] == pytest.approx(b["policy/grad_norm"], rel=1e-4)
    assert a["mismatch/k3"] == pytest.approx(b["mismatch/k3"], rel=1e-5)
    close(whole.weights(), parts.weights())


def test_streaming_does_not_depend_on_how_groups_are_handed_over() -> None:
    one, many = make_core(DAPO, {"micro_tokens": 50}), make_core(DAPO, {"micro_tokens": 50})
    one.begin(0)
    one.accumulate(make_groups())
    one.measure()
    one.finish()
    run_step(many, make_groups())
    assert same(one.weights(), many.weights())


def test_a_replayed_update_equals_a_streamed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proximal log-probs from a pass of their own are those of the update's own forward."""
    streamed, replayed = make_core(DAPO), make_core(DAPO)
    monkeypatch.setattr(type(replayed), "streams", False)
    a = run_step(replayed, make_groups())
    monkeypatch.undo()
    b = run_step(streamed, make_groups())
    assert a["policy/loss"] == pytest.approx(b["policy/loss"], abs=1e-7)
    close(streamed.weights(), replayed.weights())


def test_updates_without_signal_leave_weights_and_optimiser_bit_identical(tmp_path: Path) -> None:
    core = make_core(DAPO)
    run_step(core, make_groups())
    before, moments = snapshot(core), core.updater.optimiser.state_dict()["state"]
    moments = {k: {n: t.clone() for n, t in v.items()} for k, v in moments.items()}
    for groups in ([make_group(9, (1.0, 1.0, 1.0))], [make_group(9, (None, None))], []):
        metrics = run_step(core, groups)
        assert metrics["policy/skipped"] == 1
        assert metrics["policy/nonfinite"] == 0
        assert same(before, core.weights())
        after = core.updater.optimiser.state_dict()["state"]
        assert all(torch.equal(moments[k][n], after[k][n]) for k in moments for n in moments[k])


def optimiser_state(core: LearnerCore) -> dict[int, dict[str, Tensor]]:
    state = core.updater.optimiser.state_dict()["state"]
    return {k: {n: t.clone() for n, t in v.items()} for k, v in state.items()}


@pytest.mark.parametrize("algorithm", ["dapo", "ppo"])
@pytest.mark.parametrize("learner", [{}, {"mini_steps": 2, "epochs": 2}], ids=["one update", "four updates"])
def test_a_skipped_step_is_measured_and_moves_nothing(algorithm: str, learner: dict[str, int]) -> None:
    core = make_core(ALGORITHMS[algorithm], learner | {"schedule": {"kind": "cosine"}})
    run_step(core, make_groups(seed=1))
    before, moments, update = snapshot(core), optimiser_state(core), core.updater.update
    metrics = run_step(core, make_groups(seed=2), version=1, skip=True)
    assert metrics["policy/skipped"] == core.config.num_updates
    assert metrics["policy/nonfinite"] == 0
    assert metrics["mismatch/k3"] > 0
    assert same(before, core.weights())
    assert all(same(moments[k], after) for k, after in optimiser_state(core).items())
    assert core.updater.update == update, "the schedule waits"
    other = make_core(ALGORITHMS[algorithm], learner | {"schedule": {"kind": "cosine"}})
    run_step(other, make_groups(seed=1))
    for one in (core, other):
        run_step(one, make_groups(seed=3), version=2)
    assert same(core.weights(), other.weights()), "no trace of the skipped gradient"


@pytest.mark.parametrize("learner", [{}, {"mini_steps": 2}], ids=["streamed", "replayed"])
def test_what_is_measured_is_what_is_logged(learner: dict[str, int]) -> None:
    core = make_core(DAPO, learner | {"micro_tokens": 40})
    core.begin(0)
    core.accumulate(make_groups())
    measured = core.measure()
    logged = core.finish()
    assert "mismatch/k3" in measured
    assert "policy/entropy" in measured
    assert {k: v for k, v in logged.items() if k in measured and "clip" not in k} == {
        k: v for k, v in measured.items() if "clip" not in k
    }


def test_a_correction_set_between_steps_acts() -> None:
    plain, strict = make_core(DAPO | {"correction": "none"}), make_core(DAPO | {"correction": {"name": "tis"}})
    for core in (plain, strict):
        run_step(core, [])
    plain.set_correction("tis")
    for core in (plain, strict):
        run_step(core, make_groups(), version=1)
    assert same(plain.weights(), strict.weights())


def test_a_learning_rate_set_between_steps_is_the_top_of_the_schedule() -> None:
    schedule = {"schedule": {"kind": "linear"}}
    high, low = (make_core(DAPO, {"learning_rate": rate, **schedule}) for rate in (1e-2, 1e-3))
    for core in (high, low):
        run_step(core, [])
    high.set_learning_rate(1e-3)
    rates = [run_step(core, make_groups(), version=1)["policy/learning_rate"] for core in (high, low)]
    assert rates[0] == rates[1] < 1e-3
    assert same(high.weights(), low.weights())


def test_a_correction_that_does_not_exist_is_refused_and_changes_nothing() -> None:
    core = make_core(DAPO)
    before = core.objective
    with pytest.raises(ConfigError, match="unknown correction 'tiss': did you mean 'tis'"):
        core.set_correction("tiss")
    assert core.objective is before


@pytest.mark.parametrize("learner", [{}, {"mini_steps": 2}], ids=["streamed", "replayed"])
def test_weights_that_are_not_finite_show_and_then_stop_the_run(learner: dict[str, int]) -> None:
    core = make_core(DAPO, learner)
    next(core.updater.module.parameters()).data[0] = math.nan
    group = make_group(0, (1.0, 0.0))
    spoilt = tuple(replace(t, tokens=torch.where(t.mask, t.tokens, 0)) for t in group.trajectories)
    group = replace(group, trajectories=spoilt)
    for _ in range(9 // core.config.num_updates):
        metrics = run_step(core, [group])
        assert metrics["policy/nonfinite"] == metrics["policy/skipped"] == core.config.num_updates
    with pytest.raises(FloatingPointError, match="inf or NaN"):
        run_step(core, [group])


def test_who_is_left_out_changes_nothing_for_the_rest() -> None:
    generator = torch.Generator().manual_seed(5)
    group = make_group(0, (1.0, 0.0, 0.5))
    broken = make_trajectory("0/3", 1.0, generator)
    misfits = [
        make_trajectory("0/4", None, generator),
        replace(broken, logp_behav=torch.full_like(broken.logp_behav, math.nan)),
        replace(broken, logp_behav=torch.where(broken.mask, -math.inf, 0.0)),
        replace(broken, stop_reason=StopReason.LENGTH),
        replace(broken, mask=torch.zeros_like(broken.mask)),
    ]
    clean, mixed = make_core(DAPO), make_core(DAPO)
    run_step(clean, [group])
    metrics = run_step(mixed, [replace(group, trajectories=(*group.trajectories, *misfits))])
    assert same(clean.weights(), mixed.weights())
    assert metrics["mismatch/refused"] == 2


def test_truncated_answers_train_when_asked_to() -> None:
    group = make_group(0, (1.0, 0.0))
    cut = replace(group, trajectories=tuple(replace(t, stop_reason=StopReason.LENGTH) for t in group.trajectories))
    assert run_step(make_core(DAPO), [cut])["policy/skipped"] == 1
    assert run_step(make_core(DAPO | {"truncated": "keep"}), [cut])["policy/skipped"] == 0


def test_lag_counts_versions() -> None:
    metrics = run_step(make_core(DAPO), make_groups(), version=3)
    assert metrics["rollout/lag_mean"] == metrics["rollout/lag_max"] == 3


@pytest.mark.parametrize("algorithm", ["dapo", "ppo"])
def test_resume_is_bit_exact(tmp_path: Path, algorithm: str) -> None:
    straight = make_core(ALGORITHMS[algorithm], {"schedule": {"kind": "cosine"}})
    run_step(straight, make_groups(seed=1))
    straight.save(tmp_path)
    resumed = make_core(ALGORITHMS[algorithm], {"schedule": {"kind": "cosine"}}, seed=7)
    resumed.load(tmp_path)
    a, b = (run_step(core, make_groups(seed=2), version=1) for core in (straight, resumed))
    assert same(straight.weights(), resumed.weights())
    assert a["policy/learning_rate"] == b["policy/learning_rate"]
    assert a["policy/loss"] == b["policy/loss"]


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_a_resumed_run_takes_the_optimiser_s_options_from_its_recipe(tmp_path: Path, optimiser: str) -> None:
    core = make_core(DAPO, {"optimiser": optimiser, "weight_decay": 0.0})
    run_step(core, make_groups(seed=1))
    core.save(tmp_path)
    options = {"optimiser": {"name": optimiser, "betas": (0.5, 0.6)}, "weight_decay": 0.3}
    resumed = make_core(DAPO, options, seed=7)
    resumed.load(tmp_path)
    groups = resumed.updater.optimiser.param_groups
    assert {group["weight_decay"] for group in groups} == {0.0, 0.3}
    assert {group["betas"] for group in groups if "betas" in group} == {(0.5, 0.6)}
    assert len(resumed.updater.optimiser.state) == len(core.updater.optimiser.state) > 0
    for one in (core, resumed):
        run_step(one, make_groups(seed=2), version=1)
    assert not same(core.weights(), resumed.weights())


@pytest.mark.parametrize(
    ("algorithm", "learner", "why"),
    [
        (DAPO, {"optimiser": "muon"}, "its optimiser is adamw, the recipe's is muon"),
        (ALGORITHMS["ppo"], {}, "it lacks lm_head.value"),
    ],
    ids=["optimiser", "value head"],
)
def test_a_state_that_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, algorithm: dict[str, str], learner: dict[str, str], why: str
) -> None:
    make_core(DAPO).save(tmp_path)
    other = make_core(algorithm, learner, seed=7)
    before = snapshot(other)
    with pytest.raises(ConfigError, match=re.escape(why)) as refusal:
        other.load(tmp_path)
    assert "\n" not in str(refusal.value)
    assert same(before, other.weights())


def test_supervised_updates_learn_the_examples() -> None:
    core = make_core(DAPO, {"micro_tokens": 32})
    examples = [(t.tokens, t.mask) for group in make_groups(2) for t in group.trajectories]
    losses = [core.supervised(examples, 1e-2)["warmup/loss"] for _ in range(15)]
    assert losses[0] == pytest.approx(math.log(53), rel=0.1)
    assert losses[-1] < losses[0] / 2


def test_activation_checkpointing_changes_nothing() -> None:
    plain, recomputed = make_core(DAPO), make_core(DAPO, {"activation_checkpointing": True})
    for core in (plain, recomputed):
        run_step(core, make_groups())
    assert same(plain.weights(), recomputed.weights())


def test_published_weights_hold_tied_ones_once_and_no_value_head() -> None:
    names = make_core({"surrogate": "ppo"}).weights().keys()
    assert "model.embed_tokens.weight" in names
    assert not [name for name in names if name.startswith("lm_head")]


class MemoryBus:
    def __init__(self, groups: list[Group]) -> None:
        self.groups = {group.index: group for group in groups}

    async def put(self, group: Group) -> None:
        self.groups[group.index] = group

    async def get(self, index: int) -> Group:
        return self.groups.pop(index)

    async def drop(self, index: int) -> None:
        del self.groups[index]


class MemoryStore(dict[int, Mapping[str, Tensor]]):
    def put(self, version: int, weights: Mapping[str, Tensor]) -> None:
        self[version] = {name: tensor.clone() for name, tensor in weights.items()}

    def get(self, version: int) -> Mapping[str, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self[version]


async def indices(num: int) -> AsyncIterator[int]:
    for i in range(num):
        await asyncio.sleep(0)
        yield i


def test_the_local_learner_takes_groups_off_the_bus_and_publishes_versions(tmp_path: Path) -> None:
    async def main() -> None:
        core, bus, store, saved = make_core(DAPO), MemoryBus(make_groups()), MemoryStore(), {}
        learner = LocalLearner(core, bus, store, save_weights=lambda folder, weights: saved.update(weights))
        await learner.publish(0)
        result = await learner.step(0, indices(4))
        await learner.save(tmp_path)
        await learner.close()
        assert result.version == 1
        assert not bus.groups
        assert same(store[1], core.weights())
        assert not same(store[0], store[1]), "published versions are snapshots"
        assert same(saved, core.weights())

    asyncio.run(main())


def test_the_local_learner_asks_before_the_weights_move() -> None:
    async def main() -> None:
        core, bus, store = make_core(DAPO), MemoryBus(make_groups()), MemoryStore()
        learner = LocalLearner(core, bus, store, save_weights=lambda folder, weights: None)
        await learner.publish(0)
        asked: list[Mapping[str, float]] = []
        result = await learner.step(0, indices(4), lambda measured: asked.append(measured) or False)
        await learner.close()
        assert [m["mismatch/k3"] for m in asked] == [result.metrics["mismatch/k3"]]
        assert result.version == 1
        assert result.metrics["policy/skipped"] == 1
        assert same(store[0], store[1]), "the version advances, the weights do not"

    asyncio.run(main())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_learns_what_float32_learns(dtype: str) -> None:
    exact, rounded = make_core(DAPO), make_core(DAPO, {"dtype": dtype})
    before = snapshot(exact)
    a, b = run_step(exact, make_groups()), run_step(rounded, make_groups())
    assert b["policy/grad_norm"] == pytest.approx(a["policy/grad_norm"], rel=0.05)
    weights = rounded.weights()
    assert {tensor.dtype for tensor in weights.values()} == {getattr(torch, dtype)}
    masters = dict(rounded.updater.masters.named_parameters())
    for name, tensor in exact.weights().items():
        learned, found = tensor - before[name], masters[name] - before[name]
        assert (found - learned).norm() < 0.2 * learned.norm() + 1e-3 * before[name].norm(), name
