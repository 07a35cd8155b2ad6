"""What an analysis of expert routes counts, and the files it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lockstep.metrics import TAUS
from lockstep.report.route_page import shown, write_route_study
from lockstep.report.route_study import MAX_POINTS, Comparison, RouteStudy

DIFFERING = [
    np.array([[0, 0, 1], [2, 0, 1], [0, 0, 0]]),  # an answer of three forwarded tokens, three layers
    np.array([[1, 0, 0]]),
]


def comparison(key: str, num: int = 50) -> Comparison:
    p = np.linspace(0.01, 1, num)
    metrics = {f"mismatch/f{tau:g}": 0.1 / tau for tau in TAUS}
    metrics |= {f"mismatch/{name}": 0.5 for name in ("k3", "dp_mean", "dp_max", "w_max")}
    metrics |= {f"routing/{name}": 0.25 for name in ("differ", "differ_tokens", "differ_per_token")}
    return Comparison(key=key, label=f"<{key}>", x_label="a", y_label="b", x=p, y=p**2, metrics=metrics)


@pytest.fixture
def study() -> RouteStudy:
    return RouteStudy(
        model="<b>model</b>",
        facts={"answers": "2", "sampled tokens": "50"},
        num_experts=8,
        top_k=2,
        live=comparison("live"),
        replayed=comparison("replayed"),
        repeated=comparison("repeated", num=MAX_POINTS + 7),
        differing=DIFFERING,
    )


def test_routers_tokens_sequences_and_layers_are_counted(study: RouteStudy) -> None:
    np.testing.assert_allclose(study.by_router(), [8 / 12, 3 / 12, 1 / 12])
    np.testing.assert_allclose(study.by_token(), [1 / 4, 2 / 4, 1 / 4, 0])
    np.testing.assert_allclose(study.by_sequence(), [1, 1])
    np.testing.assert_allclose(study.by_layer(), [2 / 4, 0, 2 / 4])


def test_the_page_stands_alone_and_the_figures_are_kept(study: RouteStudy, tmp_path: Path) -> None:
    page = write_route_study(study, tmp_path / "new" / "routing").read_text()
    assert "<b>model</b>" not in page
    assert "&lt;b&gt;model" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert page.count('<figure class="card" data-panel=') == len(study.panels()) == 8
    kept = json.loads((tmp_path / "new" / "routing" / "study.json").read_text())
    assert kept["tokens_by_differing_layers"] == [0.25, 0.5, 0.25, 0.0]
    assert kept["metrics"]["live"]["mismatch/k3"] == 0.5
    assert len(kept["probabilities"]["repeated"]["x"]) == MAX_POINTS
    pictures = {path.stem for path in (tmp_path / "new" / "routing").glob("*.png")}
    assert pictures == {panel.chart.key for panel in study.panels()}
    assert {"f_curve", "scatter_live", "scatter_replayed", "scatter_repeated", "by_sequence"} <= pictures


def test_figures_are_shown_as_people_read_them() -> None:
    assert shown("mismatch/f2", 0.0123) == "1.23%"
    assert shown("mismatch/k3", 1.5e-3) == "0.0015"
    assert shown("mismatch/pearson", None) == "–"
