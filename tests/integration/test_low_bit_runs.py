"""Low-bit runs by the command: audited, stopped by any difference, saved in high precision, resumed bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import command_runs as runs
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from lockstep.assembly.estimate import estimate
from lockstep.assembly.recipe import Recipe
from lockstep.assembly.run import train
from lockstep.cli import BAD_INPUT, FAILED
from lockstep.config import load
from lockstep.learner.checkpoint import read_masters
from lockstep.models import lowbit
from lockstep.models.tiny import byte_tokenizer
from lockstep.rollout.core import EngineCore

LOW_BIT = ["rollout.precision=w4a8", "device=cpu", "eval.samples=0"]
STEPS = 4


def recipe(folder: Path, *overrides: str) -> Recipe:
    return load(Recipe, runs.write_recipe(folder), [f"train.steps={STEPS}", *LOW_BIT, *overrides])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("low-bit")
    train(recipe(folder), folder / "run", plain=True)
    return folder / "run"


def test_the_gap_stays_closed_and_codes_change(finished: Path) -> None:
    assert max(runs.metrics(finished, "mismatch/k3").values()) < 1e-6
    assert min(runs.metrics(finished, "quant/changed").values()) > 0


def test_checkpoints_are_in_high_precision_and_load_in_plain_transformers(finished: Path) -> None:
    folder = finished / f"checkpoints/step-{STEPS:06d}"
    module = AutoModelForCausalLM.from_pretrained(folder)
    masters = read_masters(folder)
    assert masters is not None
    for name, weight in module.named_parameters():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, masters.weights[name]), name
    assert torch.isfinite(module(torch.tensor([[1, 2, 3]])).logits).all()


def test_killed_it_resumes_bit_for_bit(finished: Path, tmp_path: Path) -> None:
    """As a kill after the second checkpoint leaves it: logs of steps that no checkpoint has."""
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    for later in (3, 4):
        shutil.rmtree(run / f"checkpoints/step-{later:06d}")
    train(recipe(tmp_path), run, resume=True, plain=True)
    assert runs.weights(run, STEPS) == runs.weights(finished, STEPS)
    for metric in ("reward/mean", "quant/changed", "mismatch/k3"):
        assert runs.metrics(run, metric) == runs.metrics(finished, metric)


def test_audit_of_a_run_and_of_a_checkpoint(finished: Path, tmp_path: Path, command) -> None:
    code, table, _ = command("audit", str(finished))
    assert code == 0
    assert "model.layers.*.mlp.up_proj.weight" in table
    assert "w4a8" in table
    assert "same bytes, same format, same kernel on both sides" in table
    checkpoint = str(finished / f"checkpoints/step-{STEPS:06d}")
    given = ("--recipe", str(runs.write_recipe(tmp_path)), "rollout.precision=int8_w8a8")
    code, table, _ = command("audit", checkpoint, *given)
    assert (code, "int8_w8a8" in table, "w4a8" in table) == (0, True, False)


def test_audit_shows_a_learner_that_runs_something_else(finished: Path, command) -> None:
    code, table, errors = command("audit", str(finished), "learner.alignment=none")
    assert code == FAILED
    assert "w4a8, " in table
    assert "float32" in table
    assert len(errors) == 1
    assert "14 of 24 weights differ, as learner.alignment = none asks: model.layers.0." in errors[0]
    assert "w4a8 in the sampler, float32 in the learner" in errors[0]


Load = Callable[[EngineCore, Mapping[str, Tensor]], None]


def flip_a_code(core: EngineCore, weights: Mapping[str, Tensor], load: Load = EngineCore.load_weights) -> None:
    load(core, weights)
    core.module.state_dict()["model.layers.1.mlp.down_proj.weight.codes"].view(-1)[5] ^= 1


def load_once(core: EngineCore, weights: Mapping[str, Tensor], load: Load = EngineCore.load_weights) -> None:
    if not hasattr(core, "loaded"):
        load(core, weights)
        core.loaded = True  # type: ignore[attr-defined]


def leave_one_out(module, layers, format, lookup, install=lowbit.install_straight_through) -> None:
    install(module, layers[:-1], format, lookup)


BYTES = "the sampler's bytes are not those that were published"
PLANTED = {
    "a flipped code": (EngineCore, "load_weights", flip_a_code, f"model.layers.1.mlp.down_proj.weight: {BYTES}", 0),
    "a missed update": (EngineCore, "load_weights", load_once, BYTES, 1),
    "a layer left out": (lowbit, "install_straight_through", leave_one_out, "w4a8 in the sampler, float32 in the", 0),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_difference_ends_the_run(fault: str, tmp_path: Path, command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step, or right after the sync that went wrong: in one line, with exit code 1."""
    owner, name, faulty, complaint, steps = PLANTED[fault]
    monkeypatch.setattr(owner, name, faulty)
    path = str(runs.write_recipe(tmp_path))
    code, _, errors = command("train", path, *LOW_BIT, "train.max_staleness=1", "learner.alignment=aligned", "--plain")
    assert code == FAILED
    assert len(errors) == 1
    assert "sampler and learner do not run the same model: " in errors[0]
    assert complaint in errors[0]
    assert len(runs.metrics(tmp_path / "runs/small", "reward/mean")) == 0, "the step is not counted as done"
    assert (tmp_path / "runs/small/checkpoints/step-000000").exists() == bool(steps)


def test_a_model_that_cannot_be_quantized_is_refused(tmp_path: Path, command) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=261, n_positions=64, n_embd=16, n_layer=1, n_head=2)).save_pretrained("gpt2")
    byte_tokenizer().save_pretrained("gpt2")
    path = runs.write_recipe(tmp_path)
    text = path.read_text()
    shape = text[text.index("[model.init]") : text.index("[task]")]
    path.write_text(text.replace(shape, '[model]\npath = "./gpt2"\n'))
    why = "rollout.precision = 'w4a8': cannot quantize transformer.h.0.attn.c_attn.weight: Conv1D holds its weight"
    for arguments in (["--plain"], ["--dry-run"]):
        code, _, errors = command("train", str(path), *LOW_BIT, *arguments)
        assert (code, len(errors)) == (BAD_INPUT, 1)
        assert why in errors[0]
    assert not (tmp_path / "runs/small").exists()


def test_the_memory_estimate_counts_low_bit_copies(tmp_path: Path) -> None:
    def parts(*overrides: str) -> dict[str, float]:
        shape = ("model.init.hidden=256", "train.max_staleness=1")
        return estimate(recipe(tmp_path, *shape, *overrides))

    high, four, eight = (parts(f"rollout.precision={name}") for name in ("high", "w4a16", "int8_w8a8"))
    assert high["low-bit weights"] == 0
    assert four["low-bit weights"] == pytest.approx(four["weights"] * (0.5 + 1 / 32) / 4, rel=0.1), "most are matrices"
    assert eight["low-bit weights"] == pytest.approx(2 * four["low-bit weights"], rel=0.05)
    copies = "weights of the engine and the store"
    assert four[copies] < 0.25 * high[copies]
    assert parts("rollout.precision=w4a16", "learner.mini_steps=2")["low-bit weights"] == 2 * four["low-bit weights"]
