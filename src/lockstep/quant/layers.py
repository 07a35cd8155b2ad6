"""The one list of quantized layers, read by the engine, the learner, the publication and the audit.

Quantized is every weight matrix of the decoder layers: linear layers and the fused experts of a mixture. Never
quantized: embeddings, lm_head, norms, biases, routers and the gate of a shared expert (KEPT), vision and audio towers.
A weight that is neither stops the run: what is quantized is never left to chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Literal

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

KEPT = ("*.gate.weight", "*.router.weight", "*.router.*.weight", "*.shared_expert_gate.weight")
FUSED_EXPERTS = ("gate_up_proj", "down_proj")

Kind = Literal["linear", "experts"]


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    name: str  # of its weight: "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.experts.gate_up_proj"
    kind: Kind

    @property
    def module_name(self) -> str:
        return self.name.rpartition(".")[0]


def quantized_layers(module: PreTrainedModel, keep: Sequence[str] = ()) -> list[QuantizedLayer]:
    """Of a module as it was loaded, in its own order. Weights whose name matches a pattern of `keep` stay as they are.

    ValueError for a weight that cannot be quantized, and for a pattern that matches nothing.
    """
    weights = list(_decoder_weights(module))
    if not weights:
        raise ValueError(f"cannot quantize {type(module).__name__}: found no decoder layers in it")
    for pattern in keep:
        if not any(fnmatch(name, pattern) for name, _ in weights):
            raise ValueError(f"no weight of the decoder layers matches {pattern!r}; one is {weights[0][0]!r}")
    skipped = (*KEPT, *keep)
    chosen = [(name, owner) for name, owner in weights if not any(fnmatch(name, pattern) for pattern in skipped)]
    layers = [QuantizedLayer(name, _kind(name, owner)) for name, owner in chosen]
    _refuse_split_experts(layers)
    return layers


def _decoder_weights(module: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Parameters of two and more dimensions in the decoder's lists of layers, with the modules that own them."""
    decoder = module.get_decoder()
    inside = {id(part) for stack in decoder.children() if isinstance(stack, nn.ModuleList) for part in stack.modules()}
    for path, owner in module.named_modules():
        if id(owner) in inside:
            named = owner.named_parameters(prefix=path, recurse=False)
            yield from ((name, owner) for name, parameter in named if parameter.ndim > 1)


def _kind(name: str, owner: nn.Module) -> Kind:
    if type(owner) is nn.Linear:
        return "linear"
    if is_fused_experts(owner):
        return "experts"
    why = "holds its weight transposed" if isinstance(owner, Conv1D) else "is no linear layer or fused experts we know"
    raise ValueError(f"cannot quantize {name}: {type(owner).__name__} {why}")


def _refuse_split_experts(layers: Sequence[QuantizedLayer]) -> None:
    per_module = Counter(layer.module_name for layer in layers if layer.kind == "experts")
    for name, count in per_module.items():
        if count != len(FUSED_EXPERTS):
            raise ValueError(f"the experts {name} are quantized whole: keep {' and '.join(FUSED_EXPERTS)}, or neither")


def is_fused_experts(module: nn.Module) -> bool:
    """[E, 2·I, H] and [E, H, I] without biases, in a class that takes expert functions from transformers' registry.

    Those of GPT-OSS and Llama 4, which are stored transposed, are not.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    if set(shapes) != set(FUSED_EXPERTS) or not hasattr(module, "_apply_gate"):
        return False
    experts, hidden, inner = shapes["down_proj"]
    return shapes["gate_up_proj"] == (experts, 2 * inner, hidden)
