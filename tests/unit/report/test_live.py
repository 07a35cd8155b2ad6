from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from lockstep.protocols import Recorder
from lockstep.report.live import LiveView, Phase, clock, compact, sparkline

from .conftest import make_group

METRICS = {"reward/mean": 0.5, "mismatch/k3": 1.2e-6, "mismatch/f2": 0.0, "perf/rollout_tokens_per_s": 5200.0}


def terminal(width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=40)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_each_step_is_one_plain_line() -> None:
    console = Console(file=io.StringIO(), width=80)
    with LiveView("demo", console=console) as view:
        view.phase("RL", 60)
        view.log(3, METRICS)
        view.event(3, "checkpoint", "saved [bold]it[/bold]")
    lines = text(console).splitlines()
    assert lines[0] == "RL: 60 steps"
    assert lines[1].startswith("RL 3/60  reward 0.5  mismatch k3 1.2e-06  mismatch F(2) 0.0%  rollout tok/s 5.2k  eta ")
    assert lines[2:] == ["step 3 checkpoint: saved [bold]it[/bold]"]


def test_a_phase_says_what_it_counts() -> None:
    console = Console(file=io.StringIO(), width=80)
    with LiveView("demo", console=console) as view:
        view.phase("loading", 0)
        view.phase("control", 60, unit="s", about="supervised learning alone for as long as RL took")
    assert text(console).splitlines() == ["loading", "control: supervised learning alone for as long as RL took, 60 s"]
    assert str(Phase("control", 60, step=12, unit="s")) == "control 12/60 s"


def test_a_phase_that_counts_no_steps_is_not_moved_by_what_is_logged() -> None:
    with LiveView("demo", console=Console(file=io.StringIO(), width=80)) as view:
        view.phase("control", 24, unit="s")
        view.reached(24)
        view.log(60, {"control/accuracy": 0.2})
        assert str(view._phase) == "control 24/24 s"


def test_plain_can_be_asked_for_in_a_terminal() -> None:
    console = terminal()
    with LiveView("demo", plain=True, console=console) as view:
        view.log(1, METRICS)
    assert "\x1b" not in text(console)


def test_a_plain_line_is_broken_between_figures_in_a_narrow_terminal() -> None:
    console = terminal(width=40)
    with LiveView("demo", plain=True, console=console) as view:
        view.phase("RL", 60)
        view.log(1, METRICS)
    assert text(console).splitlines()[1:3] == [
        "RL 1/60  reward 0.5  mismatch k3 1.2e-06",
        "  mismatch F(2) 0.0%  rollout tok/s 5.2k",
    ]


def test_the_terminal_is_restored_after_an_exception() -> None:
    console = terminal()
    with pytest.raises(KeyboardInterrupt), LiveView("demo", console=console):
        raise KeyboardInterrupt
    hidden, shown = text(console).rfind("\x1b[?25l"), text(console).rfind("\x1b[?25h")
    assert 0 <= hidden < shown


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_view_shows_the_run_at_any_width(width: int) -> None:
    console = terminal(width)
    view: LiveView = LiveView("demo [x]", console=console)
    recorder: Recorder = view
    view.phase("RL", 60)
    for step in range(50):
        recorder.log(step, {**METRICS, "reward/mean": math.nan if step == 3 else step / 50, "time/learn": 1.0})
    recorder.samples(50, make_group(0, None, 1.0, text="\x1b[2J42\ud800"))
    recorder.event(50, "alarm", "mismatch \x1b[31mrises")
    console.print(view.render())
    shown = text(console)
    for expected in ("demo [x]", "RL 49/60", "reward", "learn 100%", "alarm: mismatch [31mrises"):
        assert expected in shown
    assert "\x1b[2J" not in shown


@pytest.mark.parametrize("before", [(), (1.0,)])
def test_a_group_without_answers_leaves_the_last_answer_standing(before: tuple[float, ...]) -> None:
    console = terminal()
    with LiveView("demo", console=console) as view:
        if before:
            view.samples(1, make_group(0, *before))
        view.samples(2, make_group(1))  # the prompt was too long
        view.phase("RL", 60)
        console.print(view.render())
    assert ("It is 42." in text(console)) is bool(before)


def test_an_unfinished_view_renders_before_anything_happened() -> None:
    console = terminal()
    console.print(LiveView("demo", console=console).render())
    assert "starting 0" in text(console)


def test_the_estimate_counts_from_where_a_resume_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.report.live.time.monotonic", lambda: 110.0)
    assert Phase("RL", 60, first=40, step=50, since=100.0).eta() == pytest.approx(10.0)
    assert Phase("RL", 60, first=40, step=40, since=100.0).eta() is None


def test_numbers_stay_short() -> None:
    assert [compact(v) for v in (0.0, 0.41234, 5231.0, 2.5e6, 1.23e-5, math.nan)] == [
        "0",
        "0.412",
        "5.2k",
        "2.5M",
        "1.2e-05",
        "nan",
    ]
    assert [clock(s) for s in (5, 65, 3725)] == ["0:05", "1:05", "1:02:05"]


def test_sparklines_show_the_shape_and_leave_gaps() -> None:
    assert sparkline([0, 1, math.nan, 2, 3]) == "▁▃ ▆█"
    assert sparkline([1, 1]) == "▁▁"
    assert sparkline([math.nan]) == ""
