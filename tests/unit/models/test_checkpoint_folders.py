from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from engine_support import END, full_logp, prompt, small
from lockstep.config import ConfigError
from lockstep.models.loading import Loaded, ModelConfig, load, save
from lockstep.models.tiny import TinyModel, byte_tokenizer

CPU = torch.device("cpu")


def read(path: Path | str) -> Loaded:
    return load(ModelConfig(path=str(path)), dtype=torch.float32, device=CPU, seed=0)


@pytest.fixture(scope="module", params=[0, 4], ids=["dense", "mixture"])
def module(request: pytest.FixtureRequest) -> PreTrainedModel:
    return small(experts=request.param)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    loaded = Loaded.of(small(), byte_tokenizer())
    save(folder, loaded, loaded.module.state_dict())
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A checkpoint of its own, to spoil."""
    copy = tmp_path / "model"
    copy.mkdir()
    for path in whole.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def test_plain_transformers_loads_what_was_saved(module: PreTrainedModel, tmp_path: Path) -> None:
    loaded = Loaded.of(module, byte_tokenizer())
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}  # tied ones no longer share memory
    save(tmp_path, loaded, weights)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = prompt(40, seed=1)
    assert torch.equal(full_logp(again, tokens), full_logp(module, tokens))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("ä <|end|>") == byte_tokenizer().encode("ä <|end|>")
    assert tokenizer.chat_template == byte_tokenizer().chat_template
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == END
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(module).__name__]
    assert "lockstep" not in (tmp_path / "config.json").read_text()  # our attention is no business of others


def test_tied_weights_are_saved_once(whole: Path) -> None:
    saved = load_file(whole / "model.safetensors")
    assert "lm_head.weight" not in saved
    assert "model.embed_tokens.weight" in saved


def test_what_is_saved_are_the_weights_given_not_those_of_the_module(module: PreTrainedModel, tmp_path: Path) -> None:
    loaded = Loaded.of(module, byte_tokenizer())
    save(tmp_path, loaded, {name: torch.full_like(tensor, 0.25) for name, tensor in module.state_dict().items()})
    assert all((p == 0.25).all() for p in read(tmp_path).module.parameters())


def test_load_is_complete_and_in_eval_mode(whole: Path) -> None:
    loaded = read(whole)
    assert not loaded.module.training
    assert loaded.context == 128
    assert all(p.is_meta for p in loaded.shell.parameters())


def cut(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])

    return spoil


def rewrite(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def without_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def wrong_shape(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(31)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def other_architecture(folder: Path) -> None:
    """Weights of another model under this config."""
    save_file({"bert.embeddings": torch.ones(3)}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (remove("config.json"), "no model at .*: the folder has no config.json"),
        (remove("model.safetensors"), "cannot load the model at .*: "),
        (cut("model.safetensors"), "cannot load the model at .*: "),
        (rewrite("model.safetensors", ""), "cannot load the model at .*: "),
        (without_weight, r"is not whole: model.layers.1.mlp.up_proj.weight is missing$"),
        (wrong_shape, r"is not whole: model.norm.weight is \(31,\), its config says \(32,\)$"),
        (other_architecture, r"is not whole: .* is missing and \d+ more$"),
        (rewrite("config.json", "{"), "cannot load the model at .*: "),
        (rewrite("config.json", "[]"), "cannot load the model at .*: "),
        (rewrite("config.json", "{}"), "cannot load the model at .*: "),
        (rewrite("config.json", '{"model_type": "nothing"}'), "cannot load the model at .*: .*nothing"),
        (rewrite("config.json", '{"model_type": "vit"}'), "cannot load the model at .*: "),
        (
            rewrite("config.json", '{"model_type": "qwen3", "hidden_size": "wide"}'),
            "cannot load the model at .*: .*hidden_size",
        ),
        (remove("tokenizer.json"), "cannot load the tokenizer at .*: "),
        (cut("tokenizer.json"), "cannot load the tokenizer at .*: "),
        (without_tokenizer, "cannot load the tokenizer at .*: it has no vocabulary"),
    ],
)
def test_a_broken_checkpoint_is_refused_in_one_line(
    folder: Path, spoil: Callable[[Path], None], complaint: str
) -> None:
    spoil(folder)
    with pytest.raises(ConfigError, match=complaint) as caught:
        read(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing", "~/nothing", "a/b/c"])
def test_a_missing_folder_is_not_taken_for_a_hub_name(path: str) -> None:
    with pytest.raises(ConfigError, match=f"no model at '{path}': no such folder"):
        read(path)


def test_a_name_under_a_local_folder_is_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no model at 'runs/gone': no such folder"):
        read("runs/gone")


def test_a_run_is_not_a_model(folder: Path) -> None:
    (folder / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=r"is a run; name one of its checkpoints$"):
        read(folder)


def test_a_quantized_checkpoint_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="is already quantized; exports are for vLLM and transformers") as caught:
        read(folder)
    assert "\n" not in str(caught.value)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="no such folder"):
        read(tmp_path / "file")


def test_path_and_init_exclude_each_other() -> None:
    for values in ({}, {"path": "x", "init": {}}):
        with pytest.raises(ValueError, match="exactly one of `path` and `init`"):
            ModelConfig.model_validate(values)


def test_a_tiny_model_depends_on_its_seed_alone() -> None:
    config = ModelConfig(init=TinyModel(hidden=16, layers=1, heads=2, context=32))

    def weights(seed: int) -> torch.Tensor:
        loaded = load(config, dtype=torch.float32, device=CPU, seed=seed)
        return torch.cat([p.flatten() for p in loaded.module.parameters()])

    state = torch.random.get_rng_state()
    first = weights(1)
    assert torch.equal(torch.random.get_rng_state(), state)  # the run's own generator is left alone
    torch.rand(3)
    assert torch.equal(weights(1), first)
    assert not torch.equal(weights(2), first)


def test_the_byte_tokenizer_is_lossless() -> None:
    tokenizer = byte_tokenizer()
    text = "plain, ½ → 👩‍🔬\n\ttabs  and   spaces <|end|>"
    assert tokenizer.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) == text
    assert len(tokenizer) == 261
    assert max(tokenizer.encode("".join(map(chr, range(256))))) < 256


def test_half_precision_is_for_parameters_not_for_rotary_tables(whole: Path) -> None:
    """A rotary table rounded to bfloat16 is off by a radian at position 1,000, on both sides alike, so unseen."""
    exact = dict(AutoModelForCausalLM.from_pretrained(whole).named_buffers())
    made = ModelConfig(init=TinyModel(hidden=32, layers=1, heads=2))
    for config in (ModelConfig(path=str(whole)), made):
        half = load(config, dtype=torch.bfloat16, device=torch.device("cpu"), seed=0).module
        assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
        assert {b.dtype for b in half.buffers()} == {torch.float32}
    loaded = load(ModelConfig(path=str(whole)), dtype=torch.bfloat16, device=torch.device("cpu"), seed=0).module
    for name, buffer in loaded.named_buffers():
        assert torch.equal(buffer, exact[name]), name
