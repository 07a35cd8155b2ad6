"""What users get wrong: one clear line, exit code 2, nothing written."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import command_runs as runs
import pytest
import torch
import typer
from safetensors.torch import load_file, save_file

from lockstep.assembly.export import export
from lockstep.assembly.recipe import Recipe
from lockstep.cli import BAD_INPUT, FAILED, main, recipe_files
from lockstep.cli.bench import bench
from lockstep.config import Plugin
from lockstep.config.loading import read_tables
from lockstep.models import loading
from lockstep.models.loading import ModelConfig
from lockstep.quant import FORMATS
from lockstep.report.run_folder import RunFolder

CASES = {
    "learner.lerning_rate=1": "did you mean 'learning_rate'",
    "task=sums": "unknown task 'sums'",
    'algorithm.surrogate="grop"': "did you mean 'grpo'",
    "model.path=/no/such/model": "give exactly one of",
    "rollout.top_p=0.9": "training needs the model's own distribution",
    "train.prompts=0": "train.prompts",
    "train.group_size=1": "use 2 or more",
    "learner.learning_rate=inf": "finite",
    "model.init.experts=1": "two experts are active",
    "nonsense": "is not of the form",
    "preset=daop": "did you mean 'dapo'",
    "rollout.precision=int8": "unknown format 'int8': did you mean 'int8_w8a8'",
    'rollout.precision={name="fp8_w8a8", blok=true}': "unknown option of fp8_w8a8 'blok': did you mean 'block'",
    'rollout.precision={name="w4a8", inputs="int4"}': "w4a8.inputs",
    "learner.alignment=align": "learner.alignment",
}


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Runs the command in this process; gives the one line it complained with."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["lockstep", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        assert exit_.value.code == BAD_INPUT
        lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1
        return lines[0]

    return run


def test_what_a_resume_refuses_does_not_stay_in_a_run_that_has_no_checkpoint(
    tmp_path: Path, refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one killed in its warm-up has none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = Recipe.model_validate(read_tables(recipe_files.find("quickstart"))).model_dump(mode="json")
    folder = RunFolder.create(tmp_path / "early")
    folder.write_config(config)
    asked = ("rollout.precision=int8_w8a8", "rollout.exact=true")
    assert "needs a GPU" in refused("train", "--resume", "early", *asked, "--plain")
    assert folder.read_config() == config


@pytest.mark.parametrize(("override", "message"), CASES.items())
def test_a_bad_key_is_told_in_one_line(tmp_path: Path, refused, override: str, message: str) -> None:
    assert message in refused("train", str(runs.write_recipe(tmp_path)), override)
    assert not (tmp_path / "runs").exists()


def test_unknown_names_are_told_in_one_line(tmp_path: Path, refused) -> None:
    assert "did you mean 'quickstart'" in refused("train", "quickstrat")
    assert "no recipe at" in refused("train", "gone.toml")
    assert "name a recipe" in refused("train")
    assert "is not a folder" in refused("train", "--resume", "gone")
    assert "is not a folder" in refused("report", "gone")
    assert "did you mean 'tbpo'" in refused("explain", "tbop")
    assert "no model at './gone'" in refused("generate", "./gone", "hello")


def test_a_missing_checkpoint_is_told_in_one_line(tmp_path: Path, refused) -> None:
    recipe = runs.write_recipe(tmp_path)
    text = recipe.read_text()
    shape = text[text.index("[model.init]") : text.index("[task]")]
    recipe.write_text(text.replace(shape, '[model]\npath = "./gone"\n'))
    assert "no model at './gone'" in refused("train", str(recipe), "--plain")
    assert not (tmp_path / "runs/small").exists(), "the corrected command can be given again"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_one_is_refused(tmp_path: Path, refused) -> None:
    assert "sees no CUDA device" in refused("train", str(runs.write_recipe(tmp_path)), "device=cuda", "--plain")


def test_a_run_is_never_written_over(tmp_path: Path, refused) -> None:
    (tmp_path / "runs/small").mkdir(parents=True)
    (tmp_path / "runs/small/metrics.jsonl").write_text("")
    assert "--resume" in refused("train", str(runs.write_recipe(tmp_path)), "--plain")


def test_a_folder_that_cannot_hold_runs_is_told_in_one_line(tmp_path: Path, refused) -> None:
    (tmp_path / "file").touch()
    said = refused("train", str(runs.write_recipe(tmp_path)), "--plain", "--runs", "file")
    assert "cannot make a run in file/small: Not a directory" in said


def _files_to_write() -> list[tuple[str, str]]:
    """Of every benchmark, the options that name one."""
    commands: Any = typer.main.get_command(bench)
    return [
        (name, option.opts[0])
        for name, command in commands.commands.items()
        for option in command.params
        if option.name in ("out", "json")
    ]


@pytest.mark.parametrize(("benchmark", "option"), _files_to_write())
def test_a_benchmark_that_could_not_be_kept_is_not_begun(tmp_path: Path, refused, benchmark: str, option: str) -> None:
    (tmp_path / "file").touch()
    assert "cannot write file/page.md: Not a directory" in refused("bench", benchmark, option, "file/page.md")
    assert "cannot write gone/page.md: there is no folder gone" in refused("bench", benchmark, option, "gone/page.md")
    assert refused("bench", benchmark, option, ".").endswith("cannot write .: Is a directory")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_what_cannot_be_written_is_refused_with_its_path(unbroken: Path, tmp_path: Path, refused) -> None:
    (tmp_path / "file").touch()
    run = str(unbroken)
    assert "folder file/x/y: Not a dir" in refused("export", run, "file/x/y", "--precision", "int8_w8a8")
    assert "folder file/x: Not a dir" in refused("analyze", "routing", run, "--out", "file/x")
    assert "cannot write file/x.html: Not a dir" in refused("report", run, run, "--out", "file/x.html")
    assert "cannot write gone/x.html: there is no folder gone" in refused("report", run, run, "--out", "gone/x.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_names_that_no_file_can_have_are_refused(unbroken: Path, tmp_path: Path, refused) -> None:
    run, name = str(unbroken), "x" * 300
    for command in (
        ["train", str(runs.write_recipe(tmp_path)), "--runs", name],
        ["train", f"{name}.toml"],
        ["train", "--resume", name],
        ["train", str(runs.write_recipe(tmp_path)), f"model={{path='{name}'}}", "--plain"],
        ["eval", name],
        ["generate", name, "hello"],
        ["audit", name],
        ["export", name, "out"],
        ["export", run, name, "--precision", "int8_w8a8"],
        ["analyze", "routing", run, "--out", name],
        ["report", name],
        ["report", run, run, "--out", name],
        ["recipes", f"{name}.toml"],
    ):
        assert "File name too long" in refused(*command), command


def test_a_recipe_to_print_must_be_there_and_be_text(tmp_path: Path, refused) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert "no recipe at gone.toml" in refused("recipes", "gone.toml")
    assert "cannot read bytes.toml: 'utf-8' codec" in refused("recipes", "bytes.toml")


def test_a_comparison_takes_the_place_of_files_alone(unbroken: Path, tmp_path: Path, refused) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    run = str(unbroken)
    assert "cannot write folder: Is a directory" in refused("report", run, run, "--out", "folder")
    assert "cannot write pipe: Is not a regular file" in refused("report", run, run, "--out", "pipe")


def test_a_run_one_may_not_write_is_not_resumed(
    unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused
) -> None:
    def read_only(dir: Path) -> str:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), f"{dir}/tmp")

    shutil.copytree(unbroken, tmp_path / "copy", symlinks=True)
    monkeypatch.setattr("lockstep.cli.options.mkdtemp", read_only)
    said = refused("train", "--resume", "copy", "train.steps=7", "--plain")
    assert said.endswith("cannot write into the folder copy: Read-only file system")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_what_fails_after_the_paths_were_found_good_is_a_failure(
    unbroken: Path, monkeypatch: pytest.MonkeyPatch, command, number: int
) -> None:
    def fails(folder: RunFolder) -> None:
        raise OSError(number, os.strerror(number), "run/report.html")

    monkeypatch.setattr("lockstep.report.page.write_report", fails)
    assert command("report", str(unbroken)) == (FAILED, "", [f"error: run/report.html: {os.strerror(number)}"])


def test_a_prompt_that_is_not_utf_8_is_told_in_one_line(unbroken: Path, refused) -> None:
    prompt = os.fsdecode(b"why \xff\xfe?")
    assert r"a prompt is not valid Unicode, at 'why \udcff\udcfe?'" in refused("generate", str(unbroken), prompt)


UNREAD = {
    "rollout.top_p=0.5": "eval does not read rollout.top_p: its answers are greedy, and eval.k more at eval.temp",
    "rollout.temperature=0": "eval does not read rollout.temperature: its answers are greedy",
    "learner.learning_rate=1": "eval does not read learner.learning_rate: it is of training alone",
    "train.steps=9": "eval does not read train.steps",
    "eval.every=1": "eval does not read eval.every",
    "model.init.context=16": "model.init.context=16 has no effect: the model is the one of ",
    "lerner.dtype=float32": "did you mean 'learner'",
}


@pytest.mark.parametrize(("override", "message"), UNREAD.items())
def test_an_evaluation_refuses_what_would_not_change_it(unbroken: Path, refused, override: str, message: str) -> None:
    assert message in refused("eval", str(unbroken), override)


def test_an_audit_is_of_the_checkpoint_s_model(unbroken: Path, refused) -> None:
    assert "model.init.hidden=8 has no effect" in refused("audit", str(unbroken), "model.init.hidden=8")


def test_a_model_of_broken_weights_is_neither_saved_nor_exported(unbroken: Path, tmp_path: Path, refused) -> None:
    loaded = loading.load(
        ModelConfig(path=str(unbroken / "checkpoints/best")), dtype=torch.float32, device=torch.device("cpu"), seed=0
    )
    weights = dict(loaded.module.named_parameters())
    name = next(iter(weights))
    loading.save(tmp_path / "broken", loaded, weights)
    stored = load_file(tmp_path / "broken/model.safetensors")
    stored[name][0] = torch.nan
    save_file(stored, tmp_path / "broken/model.safetensors", {"format": "pt"})
    assert f"weights are inf or NaN, such as {name}" in refused("export", "broken", "out", "--precision", "int8_w8a8")
    with pytest.raises(FloatingPointError, match=f"not saved, .* such as {name}"):
        loading.save(tmp_path / "again", loaded, weights | {name: weights[name] * torch.inf})
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "again").exists()


def test_rewards_that_fail_never_train(tmp_path: Path) -> None:
    """NaN from every reward: nothing is learned, nothing crashes, every failure is counted."""
    recipe = str(runs.write_recipe(tmp_path))
    result = runs.lockstep(tmp_path, "train", recipe, "train.steps=2", "eval.samples=0", "--plain", PRINTABLE_NAN="1")
    assert result.returncode == 0, result.stderr
    assert "warning: 2 of 2 steps moved no weight, the model is the one it began with (every reward" in result.stdout
    assert "checkpoint  runs/small/checkpoints/step-000002" in result.stdout, "there is no best without an evaluation"
    run = tmp_path / "runs/small"
    assert runs.metrics(run, "reward/failed") == {1: 16, 2: 16}
    assert runs.metrics(run, "policy/skipped") == {1: 1, 2: 1}
    assert runs.weights(run, 2) == runs.weights(run, 0)


def test_a_resumed_run_keeps_its_model_and_its_config(unbroken: Path, tmp_path: Path, refused) -> None:
    run = tmp_path / "copy"
    shutil.copytree(unbroken, run, symlinks=True)
    before = (run / "config.json").read_text()
    assert "another `model`" in refused("train", "--resume", str(run), "model.init.hidden=64", "--plain")
    assert "its optimiser is adamw" in refused("train", "--resume", str(run), "learner.optimiser=muon", "train.steps=7")
    assert (run / "config.json").read_text() == before
    (run / "checkpoints/step-000006/learner.pt").write_bytes(b"torn")
    assert "is damaged" in refused("train", "--resume", str(run), "train.steps=7", "--plain")
    (run / "checkpoints/step-000006/model.safetensors").write_bytes(b"torn")
    said = refused("train", "--resume", str(run), "train.steps=7", "--plain")
    assert "cannot load the model at" in said
    assert "model.safetensors is damaged, or a copy that was cut short" in said
    assert said.endswith("; remove that checkpoint to go on from the one before")


def test_a_run_that_lost_what_it_goes_on_from_is_not_begun_anew(unbroken: Path, tmp_path: Path, refused) -> None:
    run = tmp_path / "copy"
    shutil.copytree(unbroken, run, symlinks=True)
    logged = (run / "metrics.jsonl").read_text()
    (run / "checkpoints").rename(run / "moved")
    assert "has no checkpoint any more" in refused("train", "--resume", str(run), "--plain")
    assert (run / "metrics.jsonl").read_text() == logged
    (run / "moved").rename(run / "checkpoints")
    (run / "config.json").unlink()
    assert "config.json is missing: put it back" in refused("train", "--resume", str(run), "--plain")


def test_a_resume_refused_for_its_task_leaves_config_and_events(unbroken: Path, tmp_path: Path, refused) -> None:
    run = tmp_path / "copy"
    shutil.copytree(unbroken, run, symlinks=True)
    before = (run / "config.json").read_text(), (run / "events.jsonl").read_text()
    command = ["train", "--resume", str(run), "train.steps=7", "--plain"]
    assert "has no training samples" in refused(*command, "task.num_train=0")
    assert ((run / "config.json").read_text(), (run / "events.jsonl").read_text()) == before


def test_a_task_without_a_method_is_refused_before_it_begins(tmp_path: Path, refused) -> None:
    (tmp_path / "half.py").write_text("class Half:\n    def samples(self, split):\n        return []\n")
    recipe = str(runs.write_recipe(tmp_path))
    assert "has no method reward" in refused("train", recipe, "task=half.py:Half", "--plain")
    assert "there is no file" in refused("train", recipe, "task=no.py:Half", "--plain")
    assert not (tmp_path / "runs").exists()


def test_an_export_is_not_exported_trained_or_sampled_from(unbroken: Path, tmp_path: Path, refused) -> None:
    checkpoint, recipe = unbroken / "checkpoints/step-000006", runs.write_recipe(tmp_path)
    export(str(checkpoint), tmp_path / "low", Plugin(package=FORMATS, name="int8_w8a8"))
    for command in (
        ["export", "low", "again"],
        ["generate", "low", "hello"],
        ["eval", "low", "--recipe", str(recipe)],
        ["audit", "low", "--recipe", str(recipe)],
        ["train", str(recipe), "model={path='low'}", "--plain"],
        ["train", str(recipe), "model={path='low'}", "--dry-run"],
    ):
        assert "'low' is already quantized" in refused(*command), command
    assert not (tmp_path / "again").exists()
    assert not (tmp_path / "runs/small").exists()


def test_a_damaged_learner_s_state_is_told_in_one_line(unbroken: Path, tmp_path: Path, refused) -> None:
    checkpoint = shutil.copytree(unbroken / "checkpoints/step-000006", tmp_path / "copy")
    state = (checkpoint / "learner.pt").read_bytes()
    (checkpoint / "learner.pt").write_bytes(state[: len(state) // 2])
    assert "learner.pt is damaged; " in refused("export", "copy", "out", "--precision", "int8_w8a8")


def test_a_run_that_is_not_there_is_not_asked_of_the_hub(tmp_path: Path, refused) -> None:
    (tmp_path / "runs").mkdir()
    for command in (["export", "runs/gone", "out"], ["audit", "runs/gone"]):
        assert "no model at 'runs/gone': no such folder" in refused(*command)


def test_a_wrong_reference_is_told_before_the_warm_up(unbroken: Path, tmp_path: Path, refused) -> None:
    def said(reference: Path | str) -> str:
        recipe = str(runs.write_recipe(tmp_path))
        return refused("train", recipe, "warmup.steps=1000000", f"algorithm.kl.reference={reference}", "--plain")

    bare = shutil.copytree(unbroken / "checkpoints/step-000006", tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    assert "no model at './gone': no such folder" in said("./gone")
    assert f"{unbroken} is a run; name one of its checkpoints" in said(unbroken)
    assert f"cannot load the tokenizer at '{bare}': the folder has none of tokenizer.json, " in said(bare)
    assert not (tmp_path / "runs").exists()


def test_a_run_has_one_writer(unbroken: Path, tmp_path: Path, refused) -> None:
    run = tmp_path / "copy"
    shutil.copytree(unbroken, run, symlinks=True)
    with RunFolder(run).locked():
        assert "another process" in refused("train", "--resume", str(run), "train.steps=7", "--plain")


def test_heads_that_do_not_fit_a_tiny_model_are_told(tmp_path: Path, refused) -> None:
    recipe = str(runs.write_recipe(tmp_path))
    assert "33 over 3 heads is 11 each" in refused("train", recipe, "model.init.hidden=33", "model.init.heads=3")
    assert "5 heads have 2 for keys and values" in refused(
        "train", recipe, "model.init.hidden=40", "model.init.heads=5"
    )


def test_pages_are_not_written_over_a_runs_own(unbroken: Path, refused) -> None:
    assert "--out is for a comparison" in refused("report", str(unbroken), "--out", "page.html")
    own = str(unbroken / "report.html")
    assert "is the report of one of these runs" in refused("report", str(unbroken), str(unbroken), "--out", own)


def test_nothing_is_written_among_a_runs_own_files(unbroken: Path, refused) -> None:
    step = str(unbroken / "checkpoints/step-000099")
    assert "that is the run" in refused("export", str(unbroken), step, "--precision", "int8_w8a8")
    assert "that is the run" in refused("analyze", "routing", "--out", str(unbroken))


def test_an_audit_needs_what_the_run_would_go_on_with(unbroken: Path, tmp_path: Path, refused) -> None:
    copy = shutil.copytree(unbroken, tmp_path / "copy", symlinks=True)
    for state in copy.glob("checkpoints/step-*/learner.pt"):
        state.unlink()
    assert "learner.pt is missing, with which the run would go on" in refused("audit", str(copy))


@pytest.mark.parametrize("override", ["train.steps=3", "learner.update_scale_by=rates", "model.init.hidden=8"])
def test_bench_scaling_refuses_what_it_varies_itself(override: str, refused) -> None:
    assert f"bench scaling sets {override.partition('=')[0]} itself" in refused("bench", "scaling", override)
