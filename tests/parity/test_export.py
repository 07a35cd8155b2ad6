"""Exported checkpoints: plain transformers finds the codes of our formats in them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from engine_support import sharpen
from lockstep.config import ConfigError, choices
from lockstep.config.plugins import load_class
from lockstep.models.export import save_compressed, scheme_of
from lockstep.models.loading import Loaded
from lockstep.models.tiny import TinyModel, byte_tokenizer, tiny_model
from lockstep.quant.encoded import Encoded
from lockstep.quant.format import Format
from lockstep.quant.formats.fp8_w8a8 import FP8W8A8
from lockstep.quant.formats.int8_w8a8 import INT8W8A8
from lockstep.quant.formats.w4a8 import W4A8
from lockstep.quant.formats.w4a16 import W4A16
from lockstep.quant.kernels.reference import unpack_int4
from lockstep.quant.layers import quantized_layers
from lockstep.quant.modules import install

FORMATS: list[Format] = [load_class("lockstep.quant.formats", name)() for name in choices("lockstep.quant.formats")]
# How far transformers' forward is from ours, relative: it computes input scales as absmax/127.5 where int8 has /127.
LOGITS = {INT8W8A8(): 0.1, W4A8(): 0.1, FP8W8A8(): 1e-5, FP8W8A8(block=True): 1e-5, W4A16(): 1e-5}


def encode(module: PreTrainedModel, format: Format) -> dict[str, Encoded]:
    return {layer.name: format.quantize(module.get_parameter(layer.name)) for layer in quantized_layers(module)}


def make(experts: int = 0) -> PreTrainedModel:
    return sharpen(tiny_model(TinyModel(hidden=128, layers=2, heads=4, context=64, experts=experts), 0), std=0.1)


def exported(folder: Path, module: PreTrainedModel, format: Format) -> dict[str, Encoded]:
    encoded = encode(module, format)
    save_compressed(folder, Loaded.of(module, byte_tokenizer()), format, encoded)
    return encoded


def reload(folder: Path) -> PreTrainedModel:
    """Decompressed at the first forward."""
    pytest.importorskip("compressed_tensors")
    module = AutoModelForCausalLM.from_pretrained(folder)
    logits(module)
    return module


@torch.no_grad()
def logits(module: PreTrainedModel) -> Tensor:
    tokens = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(1))
    return module(input_ids=tokens, use_cache=False).logits


@pytest.mark.parametrize("format", LOGITS, ids=str)
def test_transformers_runs_our_codes(format: Format, tmp_path: Path) -> None:
    module = make()
    encoded = exported(tmp_path, module, format)
    found = reload(tmp_path)
    for name, weight in encoded.items():
        assert torch.equal(found.get_parameter(name), format.dequantize(weight, torch.float32)), name
    ours = copy.deepcopy(module)
    install(ours, quantized_layers(ours), format, encoded)
    expected = logits(ours)
    distance = (logits(found) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert distance.median() < LOGITS[format]  # of tokens: a sum in another order may give an input another code


@pytest.mark.parametrize("format", [format for format in FORMATS if scheme_of(format).readable_experts], ids=str)
def test_transformers_runs_our_experts(format: Format, tmp_path: Path) -> None:
    module = make(experts=4)
    encoded = exported(tmp_path, module, format)
    found = reload(tmp_path)
    for name, weight in encoded.items():
        assert torch.equal(found.get_parameter(name), format.dequantize(weight, torch.float32)), name


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_experts_are_stored_one_by_one_with_their_codes_and_scales(format: Format, tmp_path: Path) -> None:
    module = make(experts=4)
    encoded = exported(tmp_path, module, format)
    tensors = load_file(tmp_path / "model.safetensors")
    fused = encoded["model.layers.1.mlp.experts.gate_up_proj"]
    codes = unpack_int4(fused.codes, 128) if format.bits == 4 else fused.codes
    up = "model.layers.1.mlp.experts.2.up_proj"
    stored = tensors[f"{up}.weight_packed"] if isinstance(format, W4A16) else tensors[f"{up}.weight"]
    if stored.dtype == torch.int32:
        assert tensors[f"{up}.weight_shape"].tolist() == [128, 128]
        stored = (stored[..., None] >> torch.arange(0, 32, 4) & 15).flatten(1).to(torch.int8) - 8
    assert torch.equal(stored.view(torch.int8), codes[2, 128:].view(torch.int8)), "up is the second half of gate_up"
    assert torch.equal(tensors[f"{up}.weight_scale"], fused.scales[2, 128:].reshape(128, 1))
    assert torch.equal(
        tensors["model.layers.1.mlp.gate.weight"], module.get_parameter("model.layers.1.mlp.gate.weight")
    )
    ignored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"} <= set(ignored)


def test_names_are_those_of_the_model_s_own_checkpoints(tmp_path: Path) -> None:
    """Mixtral's modules and files call the same weights differently."""
    sizes: dict[str, Any] = {"vocab_size": 261, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    module = AutoModelForCausalLM.from_config(CONFIG_MAPPING["mixtral"](**sizes, **heads))
    exported(tmp_path, module, INT8W8A8())
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {f"model.layers.0.block_sparse_moe.experts.3.w{n}.weight_scale" for n in (1, 2, 3)} <= names
    assert "model.layers.0.self_attn.q_proj.weight_scale" in names


def test_widths_that_leave_a_short_group_are_refused_by_name(tmp_path: Path) -> None:
    module = tiny_model(TinyModel(hidden=96, layers=1, heads=4, context=64), 0)
    with pytest.raises(ConfigError, match=r"q_proj\.weight has 96 inputs.*whole groups of 128"):
        exported(tmp_path / "out", module, W4A16())
    assert not (tmp_path / "out").exists()


def test_a_format_without_a_common_form_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="inputs='fp8'"):
        scheme_of(W4A8(inputs="fp8"))
