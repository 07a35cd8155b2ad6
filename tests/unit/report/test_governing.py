"""The governor and error tokens on the page."""

from __future__ import annotations

from dataclasses import replace

from lockstep.report.excerpts import excerpts
from lockstep.report.page import write_report
from lockstep.report.recorder import RecorderConfig, RunRecorder
from lockstep.report.run_folder import RunFolder
from lockstep.types import Group

from .conftest import make_group
from .test_page import data_of

DRIFT = "drift: would raise the correction to tis; mismatch/lag0/k3 0.0068 (early 0.0023)"


def with_flaws(group: Group, *flaws: str) -> Group:
    return replace(group, trajectories=tuple(replace(t, flaws=flaws) for t in group.trajectories))


def page_of(folder: RunFolder) -> str:
    return write_report(folder).read_text("utf-8")


def test_what_the_governor_said_is_on_the_page_and_marked_on_the_charts(folder: RunFolder) -> None:
    folder.write_config({"governor": {"mode": "advisory"}})
    with RunRecorder(folder) as recorder:
        for step in range(1, 12):
            recorder.log(step, {"reward/mean": 1 / step, "warmup/loss": 1.0})
        recorder.event(9, "governor", DRIFT)
        recorder.event(9, "checkpoint", "saved")
    page = page_of(folder)
    assert '<td class="mono">drift</td><td class="val">would raise the correction to tis</td>' in page
    assert "mismatch/lag0/k3 0.0068 (early 0.0023)" in page
    assert "the governor spoke first at step 9: drift" in page
    assert "advisory: it tells what it would have done" in page
    assert data_of(page)["marks"] == [9]
    assert {panel["title"]: panel["marked"] for panel in data_of(page)["panels"]} == {"Reward": True, "Warm-up": False}


def test_a_silent_governor_takes_no_room(folder: RunFolder) -> None:
    with RunRecorder(folder) as recorder:
        recorder.log(1, {"reward/mean": 0.5})
    page = page_of(folder)
    assert 'id="governor"' not in page
    assert data_of(page)["marks"] == []


def test_answers_that_fell_apart_are_shown_and_counted(folder: RunFolder) -> None:
    with RunRecorder(folder, RecorderConfig(samples_per_step=1)) as recorder:
        for step in range(1, 60):
            flaws = ("repetition", "garble") if step == 30 else ()
            recorder.samples(step, with_flaws(make_group(step, 0.5, 1.0, text="<b>wait wait wait"), *flaws))
            recorder.log(step, {"rollout/repetition": 0.25 if step == 1 else 0.5, "rollout/garble": 0.0})
    assert 30 in [row["step"] for row in excerpts(folder, each=1)]
    page = page_of(folder)
    assert "50.0% repeat themselves (first step: 25.0%), 0.0% are garbled (first step: 0.0%)" in page
    section = page.partition('id="error-tokens"')[2].partition("<h2")[0]
    assert section.count("<article") == 1
    assert "step 30 · reward 0.5 · 4 tokens · train/30" in section
    assert "&lt;b&gt;wait wait wait" in section


def test_answers_that_fell_apart_are_kept_from_any_group_and_shown_only_where_they_were_judged_worse(
    folder: RunFolder,
) -> None:
    with RunRecorder(folder, RecorderConfig(samples_per_step=1)) as recorder:
        for step in (1, 2):
            recorder.samples(step, with_flaws(make_group(10 * step, 0.0, 1.0)))
            for index in range(1, 9):
                recorder.samples(step, with_flaws(make_group(10 * step + index, 0.0, 1.0), "garble"))
    rows = list(folder.read_samples())
    assert [row["uid"] for row in rows if row["flaws"]] == ["11/0", "12/0", "21/0", "22/0"]
    page = page_of(folder)
    section = page.partition('id="error-tokens"')[2].partition("<h2")[0]
    assert section.count("<article") == section.count("reward 0 ·") == 4


def test_answers_in_order_take_no_room(folder: RunFolder) -> None:
    with RunRecorder(folder) as recorder:
        recorder.samples(1, with_flaws(make_group(1, 0.5)))
    assert "Error tokens" not in page_of(folder)
