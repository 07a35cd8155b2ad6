"""Runs with update-aware scaling: resumed bit for bit, checkpoints without the scale, exported in the run's codes."""

from __future__ import annotations

from pathlib import Path

import command_runs as runs
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lockstep.assembly.export import export
from lockstep.assembly.recipe import Recipe
from lockstep.assembly.run import train
from lockstep.cli.exporting import export_checkpoint
from lockstep.config import ConfigError, Plugin, load
from lockstep.learner.checkpoint import FILE, read_masters
from lockstep.quant import FORMATS
from lockstep.quant.formats.int8_w8a8 import INT8W8A8

NORM = "model.layers.0.input_layernorm.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


def run(folder: Path, steps: int, *, resume: bool = False) -> Path:
    overrides = [f"train.steps={steps}", "learner.update_scale=1.5", "device=cpu"]
    train(load(Recipe, runs.write_recipe(folder), overrides), folder / "run", resume=resume, plain=True)
    return folder / "run"


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("scaled"), steps=2)


def test_resumes_bit_for_bit(scaled: Path, tmp_path: Path) -> None:
    run(tmp_path, steps=1)
    resumed = run(tmp_path, steps=2, resume=True)
    assert runs.weights(resumed, 2) == runs.weights(scaled, 2)
    assert runs.metrics(resumed, "reward/mean") == runs.metrics(scaled, "reward/mean")


def test_the_run_trains_scaled_weights_and_saves_unscaled_ones(scaled: Path) -> None:
    assert max(runs.metrics(scaled, "mismatch/k3").values()) < 1e-6, "sampler and learner hold the same function"
    checkpoint = scaled / "checkpoints/step-000002"
    saved, found = load_file(checkpoint / "model.safetensors"), read_masters(checkpoint)
    assert found is not None
    masters, scale = found
    assert scale == {"factor": 1.5, "by": "weights"}
    torch.testing.assert_close(saved[NORM], masters[NORM] / 1.5)
    torch.testing.assert_close(saved[QUERY], masters[QUERY] * 1.5)


def test_exported_codes_are_the_run_s_and_scales_fit_the_saved_model(scaled: Path, tmp_path: Path) -> None:
    checkpoint = scaled / "checkpoints/step-000002"
    done = export(str(checkpoint), tmp_path / "int8", Plugin(package=FORMATS, name="int8_w8a8"))
    assert done.from_masters
    assert done.readers == "vLLM and transformers"
    tensors, found = load_file(tmp_path / "int8/model.safetensors"), read_masters(checkpoint)
    assert found is not None
    masters = found.weights
    sampled_with = INT8W8A8().quantize(masters[QUERY])
    assert torch.equal(tensors[QUERY], sampled_with.codes)
    torch.testing.assert_close(tensors[f"{QUERY}_scale"][:, 0], sampled_with.scales * 1.5)
    torch.testing.assert_close(tensors[NORM], masters[NORM] / 1.5)


def test_a_checkpoint_without_a_learner_s_state_exports_its_own_weights(scaled: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(scaled / "checkpoints/step-000002")
    model.save_pretrained(tmp_path / "plain")
    for file in (scaled / "checkpoints/step-000002").glob("tokenizer*"):
        (tmp_path / "plain" / file.name).write_bytes(file.read_bytes())
    assert not (tmp_path / "plain" / FILE).exists()
    done = export(str(tmp_path / "plain"), tmp_path / "out", Plugin(package=FORMATS, name="fp8_w8a8"))
    assert not done.from_masters


def test_the_command_asks_for_a_format_that_the_run_does_not_name(
    scaled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="choose a --precision out of fp8_w8a8, int8_w8a8"):
        export_checkpoint(str(scaled), tmp_path / "out", None, Console())
    export_checkpoint(str(scaled), tmp_path / "out", "int8_w8a8", Console())
    assert "weights in int8_w8a8, made from the checkpoint's master weights" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="exists already"):
        export_checkpoint(str(scaled), tmp_path / "out", "int8_w8a8", Console())
