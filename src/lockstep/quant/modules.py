"""Puts low-bit arithmetic into a Hugging Face module: real low-bit weights (engine) or straight-through (learner).

A weight keeps its name on both sides. In the learner it is still the parameter; in the engine its place is taken by a
`LowBitWeight`, so that `q_proj.weight` becomes `q_proj.weight.codes` and `q_proj.weight.scales` in the state dict:
the names under which they are published. Experts go through transformers' registry of expert functions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lockstep.quant import straight_through
from lockstep.quant.encoded import Encoded
from lockstep.quant.format import Format
from lockstep.quant.inputs import Rows
from lockstep.quant.layers import QuantizedLayer

LOW_BIT = "lockstep_low_bit"
STRAIGHT_THROUGH = "lockstep_straight_through"

Lookup = Callable[[str], Encoded]
"""The current codes of a weight, by its name."""


class LowBitWeight(nn.Module):
    """A weight in the engine. Its buffers are the very tensors of the `Encoded` it was made of."""

    codes: Tensor
    scales: Tensor

    def __init__(self, encoded: Encoded, format: Format) -> None:
        super().__init__()
        self.register_buffer("codes", encoded.codes)
        self.register_buffer("scales", encoded.scales)
        self.shape = encoded.shape
        self.format = format

    @property
    def encoded(self) -> Encoded:
        return Encoded(self.codes, self.scales, self.shape)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LowBitWeight:
        """Moves with the module, and refuses to be cast with it: codes and scales have no other dtype."""
        dtypes = self.codes.dtype, self.scales.dtype
        super()._apply(fn, recurse)
        if (self.codes.dtype, self.scales.dtype) != dtypes:
            raise ValueError(
                f"a low-bit weight cannot be cast to {self.scales.dtype}: cast the module before `install`"
            )
        return self

    def grouped(self, x: Tensor, offsets: Tensor) -> Tensor:
        return self.format.grouped(x, offsets, self.encoded)

    def extra_repr(self) -> str:
        return f"{self.shape}, {self.format}"


class LowBitLinear(nn.Module):
    """Takes the place of an nn.Linear in the engine."""

    bias: nn.Parameter | None

    def __init__(self, encoded: Encoded, bias: Tensor | None, format: Format) -> None:
        super().__init__()
        self.weight = LowBitWeight(encoded, format)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.data, requires_grad=False))

    def forward(self, x: Rows) -> Tensor:
        return self.weight.format.linear(x, self.weight.encoded, self.bias)


class StraightThroughLinear(nn.Module):
    """Takes the place of an nn.Linear in the learner, with its parameters."""

    def __init__(self, linear: nn.Linear, format: Format, current: Callable[[], Encoded]) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.format, self.current = format, current

    def forward(self, x: Tensor) -> Tensor:
        return straight_through.linear(x, self.weight, self.bias, self.current(), self.format)


def apply_all(linears: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """What each of some linear layers makes of one input, which straight-through ones encode once."""
    low_bit = [part for part in linears if isinstance(part, StraightThroughLinear)]
    if len(low_bit) < len(linears):
        return [linear(x) for linear in linears]
    layers = [(part.weight, part.bias, part.current()) for part in low_bit]
    (format,) = {part.format for part in low_bit}
    return straight_through.linears(x, layers, format)


def install(
    module: PreTrainedModel, layers: Sequence[QuantizedLayer], format: Format, encoded: Mapping[str, Encoded]
) -> None:
    """The engine's side: drops the listed weights and runs on `encoded`, without a copy."""
    for layer in layers:
        owner = module.get_submodule(layer.module_name)
        if layer.kind == "linear":
            assert isinstance(owner, nn.Linear)
            module.set_submodule(layer.module_name, LowBitLinear(encoded[layer.name], owner.bias, format))
        else:
            attribute = layer.name.rpartition(".")[2]
            delattr(owner, attribute)
            setattr(owner, attribute, LowBitWeight(encoded[layer.name], format))
            use_experts_function(owner, LOW_BIT)


def install_straight_through(
    module: PreTrainedModel, layers: Sequence[QuantizedLayer], format: Format, lookup: Lookup
) -> None:
    """The learner's side: the listed weights stay the parameters they are and get the gradient; `lookup` is asked for
    the codes at every forward. Before the module is sharded."""
    for layer in layers:
        owner = module.get_submodule(layer.module_name)
        current = _bind(lookup, layer.name)
        if layer.kind == "linear":
            assert isinstance(owner, nn.Linear)
            module.set_submodule(layer.module_name, StraightThroughLinear(owner, format, current))
        else:
            setattr(owner, f"{layer.name.rpartition('.')[2]}_product", GroupedProduct(format, current))
            use_experts_function(owner, STRAIGHT_THROUGH)


def low_bit_weights(module: nn.Module) -> Iterator[tuple[str, LowBitWeight]]:
    """What an engine's module really runs in low bits, by the weight's name."""
    return ((name, part) for name, part in module.named_modules() if isinstance(part, LowBitWeight))


def straight_through_weights(module: nn.Module) -> Iterator[tuple[str, Format]]:
    """What a learner's module really runs in low bits, by the weight's name, and in which format."""
    for path, part in module.named_modules():
        if isinstance(part, StraightThroughLinear):
            yield f"{path}.weight", part.format
        products = {key: value for key, value in vars(part).items() if isinstance(value, GroupedProduct)}
        for key, product in products.items():
            yield f"{path}.{key.removesuffix('_product')}", product.format


def _bind(lookup: Lookup, name: str) -> Callable[[], Encoded]:
    """A function, not a bound method: deep copies of the module then share what it looks up."""
    return lambda: lookup(name)


@dataclass(frozen=True, slots=True)
class GroupedProduct:
    """One of the two products of the learner's experts; `weight` is their parameter."""

    format: Format
    current: Callable[[], Encoded]

    def __call__(self, weight: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
        return straight_through.grouped(x, offsets, weight, self.current(), self.format)


def use_experts_function(experts: Any, name: str) -> None:
    """Through a config of its own: the model's is read by the layers that stay in high precision."""
    config = copy.copy(experts.config)
    config._experts_implementation = name
    experts.config = config


Product = Callable[[Tensor, Tensor], Tensor]  # rows [N, in] sorted by expert, offsets [E + 1] -> [N, out]


def _low_bit_experts(self: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return _experts(self, hidden, top_k_index, top_k_weights, self.gate_up_proj.grouped, self.down_proj.grouped)


def _straight_through_experts(self: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    up = partial(self.gate_up_proj_product, self.gate_up_proj)
    down = partial(self.down_proj_product, self.down_proj)
    return _experts(self, hidden, top_k_index, top_k_weights, up, down)


def _experts(
    self: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, up: Product, down: Product
) -> Tensor:
    """Σ_k weight_k · down(gate(up(x))) over each token's experts: rows sorted by expert, multiplied, put back in order
    and summed in the order of k, so that a token's sum does not depend on its neighbours."""
    num_tokens, top_k = top_k_index.shape
    expert, order = top_k_index.flatten().sort(stable=True)
    offsets = torch.searchsorted(expert, torch.arange(self.num_experts + 1, device=expert.device)).int()
    y = down(self._apply_gate(up(hidden[order // top_k], offsets)), offsets)
    y = torch.empty_like(y).index_copy(0, order, y).unflatten(0, (num_tokens, top_k))
    return (y * top_k_weights[..., None]).sum(1).to(hidden.dtype)


ALL_EXPERTS_FUNCTIONS.register(LOW_BIT, _low_bit_experts)
ALL_EXPERTS_FUNCTIONS.register(STRAIGHT_THROUGH, _straight_through_experts)
