from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.report.charts import MAX_POINTS, panels
from lockstep.report.health import flag
from lockstep.report.history import History, Series, collect


def series(*values: float) -> Series:
    return Series(np.arange(len(values), dtype=float), np.array(values, dtype=float))


def run(name: str = "run", **metrics: Series) -> History:
    return History(name=name, series={key.replace("__", "/"): value for key, value in metrics.items()}, seconds=1.0)


def panel(history: History, key: str):
    return next((p for p in panels([history]) if p.chart.key == key), None)


def test_rows_become_series_and_a_step_logged_twice_counts_last() -> None:
    rows = [
        {"step": 2, "time": 1, "a": 0.5},
        {"step": 1, "time": 0, "a": "NaN", "b": 1},
        {"step": 2, "time": 2, "a": 0.7},
    ]
    found = collect(rows)
    assert found["a"].steps.tolist() == [1, 2]
    assert math.isnan(found["a"].values[0])
    assert found["a"].last == 0.7
    assert found["b"].values.tolist() == [1]


@given(st.lists(st.floats(width=32), min_size=1, max_size=300), st.integers(4, 40))
def test_thinning_keeps_the_bound_the_order_and_the_extremes(values: list[float], limit: int) -> None:
    whole = series(*values)
    thin = whole.thin(limit)
    assert 0 < len(thin) <= max(limit, 1)
    assert (np.diff(thin.steps) > 0).all()
    finite = whole.values[np.isfinite(whole.values)]
    if len(finite):
        kept = thin.values[np.isfinite(thin.values)]
        assert (kept.min(), kept.max()) == (finite.min(), finite.max())


def test_tokens_are_speed_times_busy_seconds_where_both_are_known() -> None:
    history = run(perf__rollout_tokens_per_s=series(100, 200, math.nan), time__rollout=series(1, 2))
    assert history.sampled_tokens == 500
    assert run().sampled_tokens is None


def test_the_control_is_a_dashed_line_of_its_own() -> None:
    history = run(eval__accuracy=series(0.3, 0.9), control__accuracy=series(0.4))
    accuracy = panel(history, "accuracy")
    assert accuracy is not None
    control = accuracy.lines[-1]
    assert control.dashed
    assert control.y.tolist() == [0.4, 0.4]


def test_charts_without_data_are_left_out_and_long_ones_are_thinned() -> None:
    history = run(reward__mean=series(*np.linspace(0, 1, 10_000)))
    assert [p.chart.key for p in panels([history])] == ["reward"]
    assert len(panels([history])[0].lines[0].x) <= MAX_POINTS


def test_exact_agreement_falls_back_to_a_linear_axis() -> None:
    for values, log in ((series(0, 0), False), (series(0, 1e-6), True)):
        mismatch = panel(run(mismatch__k3=values), "mismatch")
        assert mismatch is not None
        assert mismatch.y_log is log


def test_the_f_curve_is_ordered_by_tau() -> None:
    history = History("run", {f"mismatch/f{t}": series(1 / t, 2 / t) for t in (10, 1.1, 2, 100)}, 1.0)
    curve = panel(history, "f_curve")
    assert curve is not None
    assert [line.label for line in curve.lines] == ["step 0", "step 1"]
    assert curve.lines[0].x.tolist() == [1.1, 2, 10, 100]


def test_a_stack_counts_steps_without_a_phase_as_zero_and_leaves_the_total_out() -> None:
    history = run(
        time__learn=series(1, 1, 1), time__eval=Series(np.array([2.0]), np.array([5.0])), time__total=series(9, 9, 9)
    )
    time = panel(history, "time")
    assert time is not None
    assert {line.label: line.y.tolist() for line in time.lines} == {"eval": [0, 0, 5], "learn": [1, 1, 1]}


def test_several_runs_share_a_chart_one_line_each() -> None:
    runs = [run("a", reward__mean=series(0, 1)), run("b", reward__mean=series(1)), run("c")]
    (reward,) = panels(runs)
    assert [line.label for line in reward.lines] == ["a", "b"]


def test_only_definite_rules_raise_a_flag() -> None:
    config = {"controller": {"max_staleness": 1}}
    assert flag("reward/failed", series(0, 1, 0), config) == "above 0 in 1 of 3 steps"
    assert flag("reward/failed", series(0, 0), config) == ""
    assert flag("rollout/lag_max", series(1, 2), config) == "reached 2, max_staleness is 1"
    assert flag("rollout/lag_max", series(1, 2), {}) == ""
    assert flag("policy/loss", series(1, math.nan), config) == "is nan"
    assert flag("my/own", series(5), config) == ""
    assert flag("policy/nonfinite", series(0, 2, 0), config) == "above 0 in 1 of 3 steps"


def test_a_mismatch_is_flagged_where_staleness_does_not_explain_it() -> None:
    assert "1e-3" in flag("mismatch/k3", series(2e-3), {"train": {"max_staleness": 0}})
    assert flag("mismatch/k3", series(2e-4), {"train": {"max_staleness": 0}}) == ""
    assert flag("mismatch/k3", series(2e-3), {"train": {"max_staleness": 1}}) == ""
    assert flag("mismatch/k3", series(2e-3), {}) == ""


@pytest.mark.parametrize(
    ("precision", "alignment", "kv_precision", "flagged"),
    [
        (None, "none", "high", True),
        (None, "aligned", "fp8", False),
        ({"name": "w4a16"}, "aligned", "high", True),
        ({"name": "w4a16"}, "aligned", "fp8", False),
        ({"name": "w4a16"}, "none", "high", False),
    ],
)
def test_a_mismatch_is_flagged_where_low_bits_do_not_explain_it(
    precision: dict[str, str] | None, alignment: str, kv_precision: str, flagged: bool
) -> None:
    config = {
        "train": {"max_staleness": 0},
        "rollout": {"precision": precision, "kv_precision": kv_precision},
        "learner": {"alignment": alignment},
    }
    assert bool(flag("mismatch/k3", series(2e-3), config)) == flagged


def test_answers_that_stop_ending_are_flagged() -> None:
    assert "rose from 10% to 60%" in flag("rollout/truncated", series(0.1, 0.3, 0.6), {})
    assert flag("rollout/truncated", series(0.9, 0.8, 0.7), {}) == ""  # a model that never ended its answers
    assert flag("rollout/truncated", series(0.1, 0.6, 0.2), {}) == ""  # and recovered
