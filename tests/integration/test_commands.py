"""The other commands, on a finished run."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import command_runs as runs
import pytest
from typer.testing import CliRunner

from lockstep.assembly.estimate import GIB, checkpoint_gib
from lockstep.assembly.recipe import Recipe
from lockstep.assembly.roles import load_model
from lockstep.cli.app import app
from lockstep.cli.training import to_toml
from lockstep.config import load
from lockstep.config.loading import validate
from lockstep.report.run_folder import RunFolder


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_eval_takes_the_best_checkpoint_and_agrees_with_the_run(unbroken: Path) -> None:
    output = run("eval", str(unbroken), "eval.k=2")
    length = max(runs.metrics(unbroken, "eval/length").values())
    assert f"{length:.4g}" in output
    assert "pass_at_k" in output
    assert "printable" in output, "shows the reasons"


def test_eval_of_a_checkpoint_within_a_run_asks_what_the_run_did(unbroken: Path) -> None:
    one, other = (run("eval", str(unbroken / "checkpoints" / name), "--show", "0") for name in ("best", "step-000001"))
    assert "eval/accuracy" in one
    assert "eval/accuracy" in other


def test_eval_names_the_checkpoint_on_a_line_of_its_own(unbroken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table is as wide as its figures, and would break a name to pieces."""
    monkeypatch.chdir(unbroken.parent)
    monkeypatch.setattr("lockstep.cli.options.console.width", 80)
    step = (unbroken / "checkpoints/best").resolve().name
    name, _, figures, *_ = run("eval", unbroken.name, "--show", "0").strip().splitlines()
    assert name.startswith(f"{unbroken.name}, {step}, on ")
    assert "eval/accuracy" in figures


def test_generate_answers_each_prompt(unbroken: Path) -> None:
    output = run("generate", str(unbroken), "e1", "e2", "-n", "2", "--max-tokens", "4", "--temperature", "1")
    assert output.count("e1 ") == output.count("e2 ") == 2
    assert output == run("generate", str(unbroken), "e1", "e2", "-n", "2", "--max-tokens", "4", "--temperature", "1")


def test_generate_computes_as_the_run_did(unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    shutil.copytree(unbroken, other, symlinks=True)
    config = json.loads((other / "config.json").read_text())
    config["model"]["float32_logits"], config["learner"]["dtype"] = True, "bfloat16"
    config["task"] = "moved/away.py:Task"  # which nobody asks for here
    (other / "config.json").write_text(json.dumps(config))
    found: list[Recipe] = []
    monkeypatch.setattr("lockstep.cli.inference.load_model", lambda recipe: found.append(recipe) or load_model(recipe))
    within = (other / "checkpoints/best").resolve()
    for folder in (unbroken, other, within, shutil.copytree(within, tmp_path / "apart")):
        run("generate", str(folder), "e1", "--max-tokens", "2")
    computed = [(recipe.model.float32_logits, recipe.learner.dtype) for recipe in found]
    assert computed == [(False, "auto"), (True, "bfloat16"), (True, "bfloat16"), (False, "auto")]


def test_what_models_say_is_never_markup(unbroken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "[/x] [bold]a[/bold]\\"
    for module in ("lockstep.cli.inference", "lockstep.rollout.worker"):
        monkeypatch.setattr(f"{module}.response_text", lambda tokenizer, tokens: said)
    assert f"[/y] {said} (" in run("generate", str(unbroken), "[/y]", "--max-tokens", "2")
    assert said in run("eval", str(unbroken), "eval.samples=2")


def test_report_draws_one_run_and_compares_two(unbroken: Path, tmp_path: Path) -> None:
    assert "report.html" in run("report", str(unbroken))
    page = tmp_path / "both.html"
    run("report", str(unbroken), str(unbroken), "--out", str(page))
    assert page.stat().st_size > 10_000


def test_dry_run_says_where_each_value_came_from(tmp_path: Path) -> None:
    output = run("train", str(runs.write_recipe(tmp_path)), "preset=gspo", "learner.mini_steps=3", "--dry-run")
    lines = output.splitlines()
    assert "mini_steps = 3  # command line" in lines, "stronger than the preset"
    assert "low = 0.0003  # preset gspo" in lines
    assert 'truncated = "keep"  # small.toml' in lines, "no part of the method"
    assert "epochs = 1" in lines, "a default"
    assert load(Recipe, _written(tmp_path, output)).algorithm.surrogate.name == "gspo", "what it prints is a recipe"


def test_dry_run_names_what_a_method_brings_along(tmp_path: Path) -> None:
    output = run("train", str(runs.write_recipe(tmp_path)), "algorithm.surrogate=acr", "--dry-run")
    lines = output.splitlines()
    assert 'advantage = "grpo"  # usual with acr' in lines
    assert "cap = 2.0  # usual with acr" in lines, "an option that the correction shares with the surrogate"
    assert "0.00" not in output
    assert "KiB" in output, "a tiny model is small, not nothing"


def test_dry_run_knows_how_large_a_checkpoint_is(unbroken: Path) -> None:
    folder = RunFolder.open(unbroken)
    recipe = validate(Recipe, folder.read_config(), "run")
    state = ("model.safetensors", "learner.pt")
    taken = sum((unbroken / "checkpoints/step-000006" / name).stat().st_size for name in state)
    assert checkpoint_gib(recipe) * GIB == pytest.approx(taken, rel=0.1), "files have headers"


def _written(folder: Path, dry_run: str) -> Path:
    path = folder / "printed.toml"
    path.write_text(dry_run)
    return path


def test_dry_run_prints_a_recipe_that_loads_again(tmp_path: Path) -> None:
    path = runs.write_recipe(tmp_path)
    output = run("train", str(path), "learner.mini_steps=3", "--dry-run")
    assert "memory, about" in output
    assert not (tmp_path / "runs").exists()
    recipe = load(Recipe, path, ["learner.mini_steps=3"])
    assert load(Recipe, _written(tmp_path, output)).learner == recipe.learner
    printed = to_toml(recipe.model_dump(mode="json", exclude_none=True))
    assert "mini_steps = 3" in output
    assert validate(Recipe, tomllib.loads(printed), "printed") == recipe


def test_doctor_says_what_would_be_used() -> None:
    output = run("doctor")
    assert "torch" in output
    assert "rollout engine" in output


def test_every_packaged_recipe_is_listed_and_valid() -> None:
    from lockstep.cli import recipe_files

    listed = run("recipes")
    for path in recipe_files.packaged():
        assert path.stem in listed
        assert recipe_files.first_comment(path)
        assert load(Recipe, path).task
    assert run("recipes", "quickstart").startswith("#")


@pytest.mark.parametrize("command", ["train", "eval", "generate", "report", "recipes", "doctor", "bench"])
def test_help_teaches(command: str) -> None:
    assert len(run(command, "--help").splitlines()) > 5


def test_a_run_is_evaluated_without_the_learners_state(unbroken: Path, tmp_path: Path) -> None:
    """Which takes most of the room, and is what people remove first."""
    copy = shutil.copytree(unbroken, tmp_path / "copy", symlinks=True)
    whole = run("eval", str(copy), "--show", "0")
    for state in copy.glob("checkpoints/step-*/learner.pt"):
        state.unlink()
    assert run("eval", str(copy), "--show", "0") == whole


def test_generate_ends_answers_where_the_run_does(unbroken: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(unbroken, tmp_path / "copy", symlinks=True)
    said = run("generate", str(copy), "hello", "--max-tokens", "8").removeprefix("hello ")
    config = json.loads((copy / "config.json").read_text())
    config["rollout"]["stop"] = [said[0]]
    (copy / "config.json").write_text(json.dumps(config))
    assert "(stop)" in run("generate", str(copy), "hello", "--max-tokens", "8")
