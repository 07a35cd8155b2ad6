"""A whole model in low bits: the engine's module and the learner's are the same function, and close to the original."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.quant import modules
from lockstep.quant.encoded import Encoded
from lockstep.quant.format import Format
from lockstep.quant.formats.int8_w8a8 import INT8W8A8
from lockstep.quant.formats.w4a16 import W4A16
from lockstep.quant.layers import QuantizedLayer, quantized_layers
from quant_support import MIXTURES, all_formats, build, same_bytes

formats = pytest.mark.parametrize("format", all_formats(), ids=str)
both = pytest.mark.parametrize("model", ["dense", "mixture"])
TOKENS = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def original(request: pytest.FixtureRequest, model: str) -> PreTrainedModel:
    return copy.deepcopy(request.getfixturevalue(model))


def encode(module: PreTrainedModel, layers: list[QuantizedLayer], format: Format) -> dict[str, Encoded]:
    return {layer.name: format.quantize(module.get_parameter(layer.name).detach()) for layer in layers}


def logits(module: PreTrainedModel) -> Tensor:
    return module(TOKENS, use_cache=False).logits


def errors_against_decoded(original: PreTrainedModel, format: Format) -> Tensor:
    """Relative, token by token, of the low-bit module against plain transformers on the decoded weights."""
    layers = quantized_layers(original)
    encoded = encode(original, layers, format)
    engine = copy.deepcopy(original)
    modules.install(engine, layers, format, encoded)
    for layer in layers:
        original.get_parameter(layer.name).data = format.dequantize(encoded[layer.name], torch.float32)
    with torch.inference_mode():
        got, expected = logits(engine), logits(original)
    return (got - expected).norm(dim=-1) / expected.norm(dim=-1)


@formats
@both
def test_the_engine_and_the_learner_are_one_function(original: PreTrainedModel, format: Format) -> None:
    layers = quantized_layers(original)
    encoded = encode(original, layers, format)
    engine, learner = copy.deepcopy(original), copy.deepcopy(original)
    modules.install(engine, layers, format, encoded)
    modules.install_straight_through(learner, layers, format, encoded.__getitem__)
    with torch.inference_mode():
        assert torch.equal(logits(engine), logits(learner))


@formats
@pytest.mark.parametrize("model", ["dense"])
def test_layers_that_share_their_input_compute_what_each_does(original: PreTrainedModel, format: Format) -> None:
    layers = quantized_layers(original)
    modules.install_straight_through(original, layers, format, encode(original, layers, format).__getitem__)
    attention = original.model.layers[0].self_attn
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    x = torch.randn(1, 7, attention.q_proj.weight.shape[1])
    plain = torch.nn.Linear(x.shape[-1], 8)
    for linears in (projections, (attention.q_proj, plain)):
        found = modules.apply_all(linears, x)
        assert all(torch.equal(y, linear(x)) for y, linear in zip(found, linears, strict=True))


@formats
@both
def test_low_bits_compute_what_their_dequantized_weights_do(original: PreTrainedModel, format: Format) -> None:
    """Against plain transformers on the decoded weights: all that is left is the rounding of inputs.

    That may send a token to another expert, so the middle one is looked at.
    """
    error = errors_against_decoded(original, format).median()
    assert error < (1e-5 if len(format.encode_input(torch.ones(1, 4))) == 1 else 0.1)


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_of_every_family(family: str) -> None:
    torch.manual_seed(0)
    assert errors_against_decoded(build(family, vocab_size=256), W4A16()).max() < 1e-5


@both
def test_names_stay(original: PreTrainedModel) -> None:
    """The learner keeps its parameters, the objects themselves; the engine's buffers are the encoded tensors."""
    format, layers = INT8W8A8(), quantized_layers(original)
    encoded = encode(original, layers, format)
    engine, learner = copy.deepcopy(original), copy.deepcopy(original)
    parameters = dict(learner.named_parameters())
    modules.install_straight_through(learner, layers, format, encoded.__getitem__)
    assert {name: id(p) for name, p in learner.named_parameters()} == {name: id(p) for name, p in parameters.items()}

    modules.install(engine, layers, format, encoded)
    state = engine.state_dict()
    low_bit = {f"{layer.name}.{key}" for layer in layers for key in ("codes", "scales")}
    assert set(state) == {name for name in original.state_dict() if name not in encoded} | low_bit
    for name, weight in modules.low_bit_weights(engine):
        assert weight.codes.data_ptr() == encoded[name].codes.data_ptr()
        assert same_bytes(weight.encoded, encoded[name])
    assert {name for name, _ in modules.low_bit_weights(engine)} == set(encoded)


@both
def test_gradients_reach_every_parameter_and_follow_the_codes(original: PreTrainedModel) -> None:
    """The learner looks its codes up at every forward: new ones count at once."""
    format, layers = INT8W8A8(), quantized_layers(original)
    encoded = encode(original, layers, format)
    modules.install_straight_through(original, layers, format, encoded.__getitem__)
    first = logits(original)
    first.logsumexp(-1).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in original.parameters())
    name = layers[0].name
    encoded[name] = format.quantize(torch.zeros_like(original.get_parameter(name)))
    assert not torch.equal(logits(original), first)


@both
def test_copies_share_what_they_look_up(original: PreTrainedModel) -> None:
    format, layers = INT8W8A8(), quantized_layers(original)
    encoded = encode(original, layers, format)
    modules.install_straight_through(original, layers, format, encoded.__getitem__)
    copied = copy.deepcopy(original)
    encoded.clear()
    with pytest.raises(KeyError):
        logits(copied)


def test_kept_experts_run_as_before(mixture: PreTrainedModel) -> None:
    """Beside quantized ones: the registry's name is not the whole model's."""
    module, format = copy.deepcopy(mixture), INT8W8A8()
    layers = quantized_layers(module, ("model.layers.0.*",))
    encoded = encode(module, layers, format)
    modules.install(module, layers, format, encoded)
    experts = [module.get_submodule(f"model.layers.{i}.mlp.experts") for i in (0, 1)]
    implementations = [e.config._experts_implementation for e in experts]  # type: ignore[union-attr]
    assert implementations == [mixture.config._experts_implementation, modules.LOW_BIT]
    with torch.inference_mode():
        assert torch.isfinite(logits(module)).all()


def test_low_bit_weights_move_and_are_never_cast(dense: PreTrainedModel) -> None:
    module, format = copy.deepcopy(dense), INT8W8A8()
    layers = quantized_layers(module)
    modules.install(module, layers, format, encode(module, layers, format))
    module.to("cpu")
    with pytest.raises(ValueError, match=r"cannot be cast to torch\.bfloat16"):
        module.to(torch.bfloat16)
