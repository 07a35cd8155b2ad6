from __future__ import annotations

import pytest
from rich.console import Console

from lockstep.cli.bench_diagnostics import Taken, compare, differences, inside, measure, table
from lockstep.cli.bench_trl import Setting
from lockstep.config import ConfigError
from lockstep.learner import passes, updates


def taken(measured: bool, seconds: float) -> Taken:
    """A step whose diagnostics take a tenth of a second, and their recording a twentieth."""
    return Taken(measured, seconds, 0.1 * measured, 0.01 + 0.05 * measured, 30 + 200 * measured)


STEPS = [taken(True, 10.2), taken(False, 10.0), taken(True, 10.4), taken(False, 10.0)]


def test_steps_are_compared_with_their_neighbours_whichever_comes_first() -> None:
    assert differences(STEPS) == pytest.approx([0.02, 0.04, 0.04])


def test_what_is_counted_inside_includes_the_recording() -> None:
    assert inside(STEPS) == pytest.approx(0.15)
    console = Console(width=200, record=True)
    console.print(table({"quickstart": STEPS}))
    text = console.export_text()
    assert "1.50%" in text
    assert "yes" in text


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'huge'; choices: quickstart, larger, updates"):
        compare(["huge"], pairs=2, threads=1, device="cpu", console=Console())


def test_every_second_step_of_a_real_run_goes_without_diagnostics() -> None:
    before = (passes.tally_mismatch, updates.tally_clipping)
    setting = Setting("tiny", prompts=2, group_size=2, prompt_tokens=4, max_tokens=4, hidden=16, layers=1)
    steps = measure(setting, pairs=1, device="cpu")
    assert [one.measured for one in steps] == [True, False]
    with_, without = steps
    assert with_.num_metrics > without.num_metrics + 100
    assert 0 < with_.inside < with_.seconds
    assert without.inside < with_.inside
    assert (passes.tally_mismatch, updates.tally_clipping) == before
