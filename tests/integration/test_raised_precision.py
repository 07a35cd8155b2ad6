"""A real run whose governor moves sampling to a higher precision: it goes on at once, and so does a resumed one."""

from __future__ import annotations

import json
from pathlib import Path

import command_runs as runs
from typer.testing import CliRunner

from lockstep.assembly.recipe import Recipe
from lockstep.assembly.run import train
from lockstep.cli.app import app
from lockstep.config import load
from lockstep.controller.checkpoints import Progress

RULES = 'governor.rules=["apart: raise_precision when mismatch/k3 >= 0 for 2 steps"]'
HELD = "sampling in precision {0}; held by the governor: rollout.precision = {0} (the recipe says w4a16)"
GOVERNED = ["rollout.precision=w4a16", "governor.mode=active", "governor.cooldown=3", RULES]


def run(folder: Path, steps: int, *more: str, resume: bool = False) -> Progress | None:
    overrides = [f"train.steps={steps}", "device=cpu", "eval.samples=0", *GOVERNED, *more]
    return train(load(Recipe, runs.write_recipe(folder), overrides), folder / "run", resume=resume, plain=True)


def events(folder: Path) -> list[tuple[int, str, str]]:
    rows = [json.loads(line) for line in (folder / "run/events.jsonl").read_text().splitlines()]
    return [(row["step"], row["kind"], row["text"].partition("; mismatch")[0]) for row in rows]


def test_it_goes_on_in_the_higher_precision_and_resumes_there(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    run(whole, 6)
    assert runs.metrics(whole / "run", "quant/bits") == {1: 4, 2: 4, 3: 8, 4: 8, 5: 8}, "then the learner's own"
    assert max(runs.metrics(whole / "run", "mismatch/k3").values()) < 1e-6
    assert events(whole) == [
        (2, "governor", "apart: raised the precision of sampling to int8_w8a8"),
        (2, "precision", f"goes on from step-000002; {HELD.format('int8_w8a8')}"),
        (5, "governor", "apart: raised the precision of sampling to high"),
        (5, "precision", f"goes on from step-000005; {HELD.format('high')}"),
    ]
    assert json.loads((whole / "run/config.json").read_text())["rollout"]["precision"] == "w4a16", "as it was begun"

    run(broken, 4)
    audited = CliRunner().invoke(app, ["audit", str(broken / "run")], catch_exceptions=False)
    assert audited.exit_code == 0, audited.output
    told, table = audited.output.split("\n", 1)
    assert told == "step-000004, held by the governor: rollout.precision = int8_w8a8 (the recipe says w4a16)"
    assert "int8_w8a8" in table
    assert "w4a16" not in table
    run(broken, 6, resume=True)
    assert (4, "resumed", f"goes on from step-000004; {HELD.format('int8_w8a8')}") in events(broken)
    assert runs.metrics(broken / "run", "quant/bits") == runs.metrics(whole / "run", "quant/bits")
    assert runs.weights(broken / "run", 6) == runs.weights(whole / "run", 6)


def test_sampling_ahead_gives_up_what_the_old_precision_was_sampling(tmp_path: Path) -> None:
    progress = run(tmp_path, 4, "train.max_staleness=2")
    assert progress is not None
    assert progress.step == 4
    assert runs.metrics(tmp_path / "run", "quant/bits") == {1: 4, 2: 4, 3: 8, 4: 8}
    assert max(runs.metrics(tmp_path / "run", "rollout/lag_max").values()) <= 2
