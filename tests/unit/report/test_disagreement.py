from __future__ import annotations

import re

import numpy as np

from lockstep.report.disagreement import disagreement
from lockstep.report.history import History, Series
from lockstep.report.page import write_report
from lockstep.report.recorder import RunRecorder
from lockstep.report.run_folder import RunFolder


def run(**logged: tuple[float, ...]) -> History:
    """`lag0__k3=(…)` is `mismatch/lag0/k3`, from step 1 on."""
    series = {
        "mismatch/" + name.replace("__", "/").replace("_dot_", "."): Series(
            np.arange(1.0, len(values) + 1), np.array(values)
        )
        for name, values in logged.items()
    }
    return History("run", series, seconds=1.0)


def part(name: str, tokens: float, k3: float, f2: float, steps: int = 10) -> dict[str, tuple[float, ...]]:
    return {
        f"{name}__tokens": (tokens,) * steps,
        f"{name}__k3": (k3,) * steps,
        f"{name}__f2": (f2,) * steps,
    }


def rows(page: str) -> list[list[str]]:
    """The text of every table cell, row by row."""
    found = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    return [re.findall(r"<t[dh][^>]*>([^<]*)", row) for row in found]


def test_parts_are_shown_by_the_range_they_cover() -> None:
    page = disagreement(run(**part("pos0", 60, 1e-4, 0.0), **part("pos16", 40, 4e-4, 0.02)))
    assert rows(page)[1:] == [["0–15", "60.0%", "0.0001", "0%", ""], ["16–31", "40.0%", "0.0004", "2%", ""]]
    assert [float(x) for x in re.findall(r"--heat:([\d.]+)", page)] == [0.5, 0.0, 1.0, 1.0]


def test_every_kind_has_readable_labels() -> None:
    parts = ("lag0", "lag8", "pos16384", "pos0", "adv_neg", "adv_pos", "prob0", "prob0_dot_9")
    page = disagreement(run(**{k: v for name in parts for k, v in part(name, 1, 0.0, 0.0).items()}))
    labels = [row[0] for row in rows(page)]
    assert labels == ["", "0", "8+", "", "0–15", "16384+", "", "A &lt; 0", "A &gt; 0", "", "0–0.01", "0.9–1"]


def test_a_kind_with_one_part_and_one_that_ended_early_are_left_out() -> None:
    assert disagreement(run(**part("lag0", 60, 1e-4, 0.0))) == ""
    early = part("pos16", 40, 1.0, 1.0, steps=3)
    assert disagreement(run(**part("pos0", 60, 1e-4, 0.0), **early)) == ""
    assert disagreement(run()) == ""


def test_acceptance_is_shown_once_something_was_rejected() -> None:
    kept = {"len0__answers": (8.0,), "len0__accepted_answers": (1.0,), "len0__accepted_tokens": (1.0,)}
    assert disagreement(run(**kept)) == ""
    lost = {"len16__answers": (4.0,), "len16__accepted_answers": (0.5,), "len16__accepted_tokens": (0.25,)}
    page = disagreement(run(**kept, **lost))
    assert rows(page)[1:] == [["0–15", "8", "100.0%", "100.0%"], ["16–31", "4", "50.0%", "25.0%"]]


def test_figures_of_parts_are_folded_away_in_the_health_table(folder: RunFolder) -> None:
    with RunRecorder(folder) as recorder:
        recorder.log(1, {"mismatch/k3": 1e-9, "mismatch/lag0/k3": 1e-9, "mismatch/adv_neg/k3": 2e-9})
    page = write_report(folder).read_text("utf-8")
    first, _, rest = page.partition("The same by part: 2 figures")
    assert "mismatch/k3" in first
    assert "mismatch/lag0/k3" not in first
    assert "mismatch/lag0/k3" in rest
