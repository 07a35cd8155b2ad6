"""`lockstep analyze routing` on models as small as they get."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from transformers import PhimoeConfig, PhimoeForCausalLM

from lockstep.cli import analyze_routing
from lockstep.cli.analyze_routing import analyze
from lockstep.cli.warm_start import drawn
from lockstep.config import ConfigError
from lockstep.models.tiny import byte_tokenizer

SHAPE = {"hidden": 32, "layers": 2, "heads": 4, "context": 64, "experts": 4}
SMALL = {"samples": 3, "answers": 2, "warmup": 2, "recipe": None}


def run(checkpoint: str | None, overrides: list[str], out: Path | None, asked: tuple[str, ...] = ()) -> str:
    console = Console(record=True, width=160)
    analyze(checkpoint, overrides, asked=asked, out=out, console=console, **SMALL)  # type: ignore[arg-type]
    return console.export_text()


def metrics(folder: Path) -> dict[str, dict[str, float]]:
    return json.loads((folder / "study.json").read_text())["metrics"]


def test_without_a_checkpoint_a_mixture_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analyze_routing, "MIXTURE", SHAPE)
    text = run(None, ["rollout.precision=w4a16", "rollout.max_tokens=8"], tmp_path / "found")
    assert "a tiny mixture" in text
    assert "2 of 4 in 2 layers · sampler w4a16 · learner float32" in text
    assert "routers that differ" in text
    found = metrics(tmp_path / "found")
    assert found["live"]["routing/differ"] > 0
    assert (tmp_path / "found" / "report.html").is_file()


def test_replay_brings_a_low_bit_sampler_and_its_learner_together(tmp_path: Path) -> None:
    """The experts of this one have nothing in common. An aligned learner has nothing left to bring together."""
    model = str(drawn(tmp_path / "model", SHAPE, std=0.2))
    options = ["rollout.precision=int8_w8a8", "rollout.max_tokens=24"]
    for alignment in ("none", "aligned"):
        text = run(model, [*options, f"learner.alignment={alignment}"], tmp_path / alignment, ("1+2=", "7-4="))
        assert model in text.replace("\n", "")
    apart, aligned = metrics(tmp_path / "none"), metrics(tmp_path / "aligned")
    assert apart["live"]["routing/differ"] > 0.01
    assert apart["replayed"]["mismatch/k3"] < apart["live"]["mismatch/k3"] / 2
    assert apart["replayed"]["mismatch/f2"] <= apart["live"]["mismatch/f2"]
    assert apart["repeated"]["mismatch/k3"] < 1e-9
    assert apart["repeated"]["routing/differ"] < 0.01
    assert aligned["live"]["mismatch/k3"] < 1e-6


def test_the_task_of_a_recipe_asks(tmp_path: Path) -> None:
    model, console = str(drawn(tmp_path / "model", SHAPE, std=0.2)), Console(record=True, width=160)
    asked = SMALL | {"recipe": "quickstart", "samples": 2, "answers": 1}
    analyze(model, ["rollout.max_tokens=4"], asked=(), out=tmp_path / "found", console=console, **asked)  # type: ignore[arg-type]
    assert "sampler float32 · learner float32 · answers 2" in console.export_text()
    assert metrics(tmp_path / "found")["live"]["routing/differ"] == 0


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    model = drawn(tmp_path / "model", SHAPE | {"experts": 0}, std=0.2)
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM is dense: it has no routers to look at"):
        run(str(model), [], tmp_path / "found", ("1+2=",))


def test_a_mixture_that_cannot_be_followed_is_refused_with_what_can_be_done(tmp_path: Path) -> None:
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = PhimoeConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, num_local_experts=4)
    PhimoeForCausalLM(config).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="nothing of it can be analysed here; to train it, set") as told:
        run(str(tmp_path / "model"), [], tmp_path / "found", ("1+2=",))
    assert "PhimoeSparseMoeBlock chooses its experts with 0 calls of topk; supported is one" in str(told.value)


def test_prompts_must_fit(tmp_path: Path) -> None:
    model = drawn(tmp_path / "model", SHAPE, std=0.2)
    with pytest.raises(ConfigError, match="none of 1 prompts fits the model's context of 64 tokens"):
        run(str(model), [], tmp_path / "found", ("1+" * 40,))
