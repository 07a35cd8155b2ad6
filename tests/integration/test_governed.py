"""A real run that its governor stops: exit code, reason, checkpoint, report; and what goes on from there."""

from __future__ import annotations

import json
from pathlib import Path

import command_runs as runs

STOP = "enough: stop when reward/mean >= 0 for 3 steps"
RAISE = "lag: raise_correction, lower_rate when rollout/lag_max >= 0"


def events(run: Path, kind: str) -> list[tuple[int, str]]:
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [(row["step"], row["text"]) for row in rows if row["kind"] == kind]


def test_a_rule_stops_a_run_which_goes_on_with_what_was_changed(tmp_path: Path, unbroken: Path) -> None:
    recipe = str(runs.write_recipe(tmp_path))
    rules = f'governor.rules=["{STOP}", "{RAISE}"]'
    stopped = runs.lockstep(tmp_path, "train", recipe, "governor.mode=active", "governor.cooldown=3", rules, "--plain")
    run = tmp_path / "runs/small"
    assert stopped.returncode == 3, stopped.stderr
    assert "the governor stopped the run: enough: stopped the run; reward/mean" in stopped.stderr
    assert "--resume" in stopped.stderr
    assert "enough" in (run / "report.html").read_text()
    assert runs.metrics(run, "policy/skipped")[3] == 1
    assert runs.weights(run, 3) == runs.weights(run, 2), "the batch it judged moved no weight"

    resumed = runs.lockstep(tmp_path, "train", "--resume", str(run), "learner.learning_rate=2e-2", "--plain")
    assert resumed.returncode == 3, resumed.stderr
    assert "silent until step 6: enough" in resumed.stdout
    assert (
        "held by the governor: algorithm.correction = icepop high=2.0 (the recipe says tis), "
        "learner.learning_rate = 0.0025 (the recipe says 0.02)"
    ) in resumed.stdout
    rates = runs.metrics(run, "policy/learning_rate")
    assert rates == {1: 1e-2, 2: 2.5e-3, 3: 2.5e-3, 4: 2.5e-3, 5: 6.25e-4, 6: 6.25e-4}
    assert set(runs.metrics(run, "reward/mean")) == set(range(1, 7))
    assert [(step, text.partition(";")[0]) for step, text in events(run, "governor")] == [
        (1, "lag: raised the correction to icepop, lowered the learning rate to 0.0025"),
        (3, "enough: stopped the run"),
        # it cooled down across the resume, and knows which rung it is on
        (
            4,
            "lag: cannot raise the correction: there is no stronger one for this algorithm, "
            "lowered the learning rate to 0.000625",
        ),
        (6, "enough: stopped the run"),
    ]


def test_an_advisor_changes_nothing(tmp_path: Path, unbroken: Path) -> None:
    recipe = str(runs.write_recipe(tmp_path))
    rules = f'governor.rules=["default", "{STOP}", "{RAISE}"]'
    result = runs.lockstep(tmp_path, "train", recipe, rules, "--plain")
    assert result.returncode == 0, result.stderr
    run = tmp_path / "runs/small"
    said = [text.partition(";")[0] for _, text in events(run, "governor")]
    assert said == [
        "lag: would raise the correction to icepop, would lower the learning rate to 0.0025",
        "enough: would stop the run",
    ]
    assert runs.weights(run, 6) == runs.weights(unbroken, 6)
