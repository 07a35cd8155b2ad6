from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.report.charts import MAX_POINTS, NUM_COLORS, PHASES
from lockstep.report.excerpts import excerpts
from lockstep.report.jsonl import JsonlWriter
from lockstep.report.page import write_comparison, write_report
from lockstep.report.plots import COLORS
from lockstep.report.recorder import RunRecorder
from lockstep.report.run_folder import RunFolder
from lockstep.report.sections import subject

from .conftest import make_group

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>&amp;\"' \u2028 \ud800"


class Tags(HTMLParser):
    """Every tag and attribute a browser would see outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def page_of(folder: RunFolder) -> str:
    return write_report(folder).read_text("utf-8")


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1], parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_an_empty_run_says_so(folder: RunFolder) -> None:
    page = page_of(folder)
    assert "Nothing has been logged yet" in page
    assert data_of(page)["panels"] == []
    assert list(folder.plots.iterdir()) == []


def test_one_step_is_enough_for_every_chart(folder: RunFolder) -> None:
    with RunRecorder(folder) as recorder:
        recorder.log(1, {"eval/accuracy": 0.25, "reward/mean": 0.5, "mismatch/k3": 1e-9, "time/learn": 1.0})
        recorder.log(1, {"mismatch/f2": 0.1, "mismatch/f10": 0.0})
        recorder.samples(1, make_group(0, 1.0))
    page = page_of(folder)
    titles = [panel["title"] for panel in data_of(page)["panels"]]
    assert titles == [
        "Held-out accuracy",
        "Reward",
        "Sampler–learner mismatch",
        "Tokens that disagree",
        "F(τ) curve",
        "Time per step",
    ]
    assert "25.0%" in page
    assert sorted(p.name for p in folder.plots.iterdir()) == [
        "accuracy.png",
        "f_curve.png",
        "f_over_time.png",
        "mismatch.png",
        "reward.png",
        "time.png",
    ]


def test_what_is_zero_throughout_is_told_and_not_drawn(folder: RunFolder) -> None:
    with RunRecorder(folder) as recorder:
        for step in range(3):
            recorder.log(step, {"reward/mean": float(step), "mismatch/k3": 0.0, "rollout/lag_mean": 0.0})
        recorder.log(3, {"rollout/truncated": math.nan})
    page = page_of(folder)
    assert [panel["title"] for panel in data_of(page)["panels"]] == ["Reward", "Cut off by the token limit"]
    assert "0 throughout, so not drawn: Sampler–learner mismatch; Staleness." in page
    assert sorted(p.name for p in folder.plots.iterdir()) == ["reward.png", "truncated.png"]


def test_the_time_of_a_run_is_told_whole(folder: RunFolder) -> None:
    rows: list[dict[str, float]] = [
        {"step": 1, "time": 10, "warmup/loss": 1.0},
        {"step": 2, "time": 20, "warmup/loss": 1.0},
        {"step": 1, "time": 50, "time/total": 29, "time/rollout": 20, "time/learn": 9},
        {"step": 1, "time": 60, "control/accuracy": 0.5},
    ]
    JsonlWriter(folder.metrics).append({"wall": 0, **row} for row in rows)
    shown = re.findall(r"</span>([\w-]+) <b>(.*?)</b> (.*?)</span>", page_of(folder))
    assert shown == [
        ("rollout", "20.0 s", "33%"),
        ("learn", "9.0 s", "15%"),
        ("warm-up", "20.0 s", "33%"),
        ("control", "10.0 s", "17%"),
        ("other", "1.0 s", "2%"),
    ]


def test_a_phase_keeps_its_colour_between_runs(tmp_path: Path) -> None:
    def colors(**seconds: float) -> dict[str, str]:
        folder = RunFolder.create(tmp_path / "-".join(seconds))
        with RunRecorder(folder) as recorder:
            recorder.log(1, {f"time/{name}": value for name, value in seconds.items()})
        page = page_of(folder)
        (chart,) = [panel for panel in data_of(page)["panels"] if panel["title"] == "Time per step"]
        bar = dict(re.findall(r'background:var\((--c\d+)\)" title="(\w+)"', page))
        drawn = {line["label"]: f"--c{line['color']}" for line in chart["lines"]}
        assert drawn == {name: color for color, name in bar.items() if name != "other"}
        return drawn

    one, other = colors(learn=2.0, rollout=1.0), colors(eval=9.0, rollout=4.0, learn=1.0)
    assert one == {name: other[name] for name in one}


def test_there_is_a_colour_for_everything_on_a_page_and_on_a_plot(folder: RunFolder) -> None:
    page = page_of(folder)
    assert len(PHASES) < NUM_COLORS == len(COLORS)
    for index in range(NUM_COLORS):
        assert len(re.findall(rf"--c{index}: #", page)) == 2, "light and dark"
    assert f"line.color % {NUM_COLORS}" in page


def test_values_that_are_not_finite_leave_gaps_and_raise_flags(folder: RunFolder) -> None:
    names = ("eval/accuracy", "reward/mean", "mismatch/k3", "mismatch/f2", "mismatch/f10", "time/learn")
    with RunRecorder(folder) as recorder:
        for step, value in enumerate((math.nan, 0.5, math.inf, -math.inf, math.nan)):
            recorder.log(step, dict.fromkeys((*names, "perf/rollout_tokens_per_s", "time/rollout"), value))
    page = page_of(folder)
    reward = next(p for p in data_of(page)["panels"] if p["title"] == "Reward")
    assert reward["lines"][0]["y"] == [None, 0.5, None, None, None]
    assert "⚠ is nan" in page


def test_all_nan_is_a_page_too(folder: RunFolder) -> None:
    with RunRecorder(folder) as recorder:
        recorder.log(1, {"eval/accuracy": math.nan, "perf/rollout_tokens_per_s": math.nan, "rollout/lag_max": math.nan})
    assert "look at eval/accuracy" in page_of(folder)


def test_text_of_the_run_cannot_become_markup(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "<u>run")
    folder.write_config({HOSTILE: {HOSTILE: HOSTILE}})
    folder.write_environment({"device": HOSTILE, "created": HOSTILE})
    with RunRecorder(folder) as recorder:
        name = HOSTILE.removesuffix("\ud800")
        recorder.log(1, {f"reward/part/{name}": 1.0, f"time/{name}": 1.0, name: math.nan})
        recorder.samples(1, make_group(0, 1.0, text=HOSTILE))
        recorder.event(1, HOSTILE, HOSTILE)
    page = page_of(folder)
    tags = Tags(page).seen
    assert sum(tag == "script" for tag, _ in tags) == 2
    assert not any(tag in ("img", "u") for tag, _ in tags)
    assert not any(name.startswith("on") for _, attributes in tags for name in attributes)
    assert data_of(page)["samples"][0]["text"].startswith("</script><script>alert(1)")


def test_the_page_asks_for_nothing_from_outside(folder: RunFolder) -> None:
    with RunRecorder(folder) as recorder:
        recorder.log(1, {"reward/mean": 0.5})
    page = page_of(folder)
    assert not any({"src", "srcset"} & attributes.keys() for _, attributes in Tags(page).seen)
    assert set(re.findall(r"https?://[^\"\s]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in page
    assert "url(" not in page


def test_ten_thousand_steps_stay_a_small_page(folder: RunFolder) -> None:
    names = ["reward/mean", "eval/accuracy", "mismatch/k3", "time/learn", "time/rollout", "policy/entropy"]
    names += [f"reward/part/{i}" for i in range(20)] + [f"mismatch/f{tau}" for tau in (1.1, 2, 10, 100)]
    noise = np.random.default_rng(0).random((10_000, len(names)))
    metrics, samples = JsonlWriter(folder.metrics), JsonlWriter(folder.samples)
    rows = (dict(zip(names, row, strict=True)) for row in noise.tolist())
    metrics.append({"step": step, "time": step, "wall": step, **row} for step, row in enumerate(rows))
    samples.append(_long_sample(step) for step in range(2_000))
    page = write_report(folder)
    assert page.stat().st_size < 3_000_000
    drawn = data_of(page.read_text("utf-8"))
    assert max(len(line["x"]) for panel in drawn["panels"] for line in panel["lines"]) <= MAX_POINTS


def _long_sample(step: int) -> dict[str, Any]:
    return {
        "step": step, "time": step, "wall": step, "group": step, "sample": "train/0", "uid": "0/0", "version": step,
        "prompt": [{"role": "user", "content": "长" * 5_000}], "expected": "42", "text": "答" * 20_000,
        "reward": step % 7 / 7, "parts": {}, "reasons": ["x" * 5_000], "stop_reason": "eos",
        "num_tokens": 9_000, "num_prompt_tokens": 5_000,
    }  # fmt: skip


def test_the_answers_shown_are_of_every_kind(folder: RunFolder) -> None:
    with RunRecorder(folder) as recorder:
        for step in range(50):
            recorder.samples(step, make_group(step, 0.5))
            if step in (20, 25, 30):
                recorder.samples(step, make_group(100 + step, {20: 1.0, 25: 0.0, 30: None}[step]))
    shown = excerpts(folder, each=1)
    assert [(row["step"], row["reward"]) for row in shown] == [(0, 0.5), (20, 1.0), (25, 0.0), (30, None), (49, 0.5)]


def test_the_same_answer_of_a_group_is_shown_once(folder: RunFolder) -> None:
    with RunRecorder(folder) as recorder:
        recorder.samples(1, make_group(0, 1.0, 1.0, 0.0))
        recorder.samples(2, make_group(0, 1.0))
    shown = excerpts(folder)
    assert [(row["step"], row["reward"], row["times"]) for row in shown] == [(1, 1.0, 2), (1, 0.0, 1), (2, 1.0, 1)]


def test_a_comparison_says_what_f_is_and_of_which_step(tmp_path: Path) -> None:
    folders = [RunFolder.create(tmp_path / name) for name in ("a", "b")]
    for folder in folders:
        with RunRecorder(folder) as recorder:
            recorder.log(1, {"mismatch/f1.1": 0.5, "mismatch/f2": 0.25})
    page = write_comparison(folders, tmp_path / "compare.html").read_text("utf-8")
    shares, curve = (panel["help"] for panel in data_of(page)["panels"])
    what = "F(τ) is the share of tokens to which sampler and learner give probabilities more than a factor τ apart"
    assert shares == f"{what}. Of each run: F(2)."
    assert curve == f"{what}; at the last step of each run."


def test_a_comparison_overlays_runs_and_names_what_differs(tmp_path: Path) -> None:
    folders = [RunFolder.create(tmp_path / name) for name in ("a", "b")]
    for rate, folder in enumerate(folders):
        folder.write_config({"seed": 0, "learner": {"learning_rate": rate}})
        with RunRecorder(folder) as recorder:
            recorder.log(1, {"reward/mean": 0.5, "time/learn": 1.0})
    page = write_comparison(folders, tmp_path / "compare.html").read_text("utf-8")
    assert [line["label"] for line in data_of(page)["panels"][0]["lines"]] == ["a", "b"]
    assert "learner.learning_rate" in page
    assert ">seed<" not in page
    with pytest.raises(ValueError, match="two runs or more, got 1"):
        write_comparison(folders[:1], tmp_path / "x.html")


def test_the_title_tells_what_is_trained_as_far_as_the_config_says() -> None:
    config = {
        "task": {"name": "arithmetic", "modulus": 10},
        "algorithm": {"surrogate": "grpo", "correction": [{"name": "tis", "cap": 2.0}, "veto"]},
        "model": {"path": "", "init": {"layers": 2, "hidden": 128}},
        "rollout": {"precision": {"name": "fp8_w8a8", "block": True}},
    }
    told = [text for text in subject(config) if text]
    assert told == ["arithmetic", "grpo + tis + veto", "tiny Qwen3, 2 layers, 128 wide", "sampled in fp8_w8a8"]
    plain = {"model": {"path": "Qwen/Qwen3-0.6B"}, "algorithm": {"surrogate": "grpo", "correction": None}}
    assert [text for text in subject(plain) if text] == ["grpo", "Qwen/Qwen3-0.6B"]
    assert not any(subject({}))


def test_what_an_unhealthy_value_means_stands_beside_it(folder: RunFolder) -> None:
    with RunRecorder(folder) as recorder:
        recorder.log(1, {"mismatch/ess": 0.9})
    assert "<small>0.5: half of the batch is wasted" in page_of(folder)
