"""Update-aware scaling (QuRL): every pre-norm times s, every matrix that reads it divided by s; the same function.

Which matrix reads which norm is not a matter of names: a probe runs through the model, and a module whose input is the
memory a norm has just written reads that norm. Routers, shared-expert gates, fused experts and (1+γ) norms are found
like any other. Then all folds are tried at once and the logits compared, so that a wrong fold is refused, never silent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from lockstep.config import ConfigError

NUM_PROBE_TOKENS = 24
PROBE_FACTOR = 0.5  # doubles matrices, which is exact in any dtype and exactly undone
TOLERANCE = 1e-5  # relative change of the logits; a power of two changes nothing, a wrong fold tenths
# A (1+γ) norm rounds its new γ, and every token feels it.
OFFSET_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
EXPERT_OUTPUT = "down_proj"  # transformers' fused experts hold both matrices; this one reads what the other gives


@dataclass(frozen=True, slots=True)
class Scaling:
    """What is scaled in one model, by parameter name.

    Exact for s a power of two; otherwise each weight is rounded once per direction. The output layer and the norm
    before it stay as they are: that layer is never quantized, and it may be the embedding.
    """

    matrices: tuple[str, ...]  # ("model.layers.0.self_attn.q_proj.weight", …), their biases are not scaled
    norms: Mapping[str, float]  # gains, with what the norm adds to them (1 in Gemma, else 0), and biases, with 0

    @torch.no_grad()
    def apply(self, weights: Mapping[str, Tensor], s: float) -> None:
        """In place, on a model's weights by name; shards of them will do."""
        for name in self.matrices:
            weights[name].div_(s)
        for name, offset in self.norms.items():
            weights[name].mul_(s).add_(offset * (s - 1))  # offset + γ becomes s·(offset + γ)

    def undo(self, name: str, weight: Tensor, s: float) -> Tensor:
        """One weight as it would be without `apply`: the very tensor if it is not scaled."""
        if name in self.norms:
            return (weight - self.norms[name] * (s - 1)) / s
        return weight * s if name in self.matrices else weight

    def rates(self, s: float) -> dict[str, float]:
        """What multiplies a parameter's learning rate to the same end, without a transform.

        Dividing W by s multiplies its gradient by s. An update that does not depend on the gradient's size (Adam's,
        Muon's) then moves W·s, the weight that counts, by s times as much; a norm's gain by 1/s.
        """
        return dict.fromkeys(self.matrices, s) | dict.fromkeys(self.norms, 1 / s)


def find_scaling(module: PreTrainedModel) -> Scaling:
    """The folds of a model as transformers made it; ConfigError naming the model and the reason if they do not hold.

    Costs three forward passes over a few tokens and, for a moment, a copy of the norms.
    """
    vocab = module.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab, (1, NUM_PROBE_TOKENS), generator=generator).to(module.device)
    scaling = _found(module, _trace(module, tokens))
    _require_in_every_layer(module, scaling)
    _require_unchanged(module, scaling, tokens)
    return scaling


def _found(module: PreTrainedModel, reads: Mapping[str, list[str]]) -> Scaling:
    head = module.get_output_embeddings()
    matrices: list[str] = []
    norms: dict[str, float] = {}
    for norm, readers in reads.items():
        read_by = [name for reader in readers for name in _matrices(reader, module.get_submodule(reader))]
        if read_by and not any(module.get_submodule(reader) is head for reader in readers):
            matrices += read_by
            norms |= _gain_and_bias(norm, module.get_submodule(norm))
    return Scaling(tuple(dict.fromkeys(matrices)), norms)  # a shared matrix may read two norms


def _trace(module: nn.Module, tokens: Tensor) -> dict[str, list[str]]:
    """For each norm, the modules with parameters that were handed its output, or a view of it, in one forward."""
    written: list[tuple[str, Tensor]] = []  # held, so that the memory is not given to another tensor meanwhile
    reads: dict[str, list[str]] = {}

    def hook(name: str, child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = {_memory(x) for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
        for norm, tensor in written:
            if _memory(tensor) in given and name not in reads[norm]:
                reads[norm].append(name)
        if _is_norm(child) and len(given) == 1:
            written.append((name, output))
            reads.setdefault(name, [])

    owners = [(name, child) for name, child in module.named_modules() if child._parameters]
    hooks = [child.register_forward_hook(partial(hook, name), with_kwargs=True) for name, child in owners]
    try:
        _logits(module, tokens)
    finally:
        for handle in hooks:
            handle.remove()
    return reads


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_norm(module: nn.Module) -> bool:
    """It has a gain per channel and nothing else but perhaps a bias."""
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    return "weight" in parameters and parameters.keys() <= {"weight", "bias"} and parameters["weight"].ndim == 1


def _gain_and_bias(name: str, norm: nn.Module) -> dict[str, float]:
    """The offset is what a norm with a gain of zero still multiplies by."""
    zeros = {key: torch.zeros_like(p) for key, p in norm.named_parameters()}
    x = torch.linspace(-1, 1, len(zeros["weight"])).to(zeros["weight"])
    offset = float(functional_call(norm, zeros, (x[None],)).any())
    return {f"{name}.{key}": offset if key == "weight" else 0.0 for key in zeros}


def _matrices(name: str, reader: nn.Module) -> list[str]:
    """Those of a reader's parameters that multiply its input."""
    found = [key for key, p in reader._parameters.items() if p is not None and p.ndim > 1 and not key.endswith("bias")]
    return [f"{name}.{key}" for key in found if key != EXPERT_OUTPUT]


def _require_in_every_layer(module: PreTrainedModel, scaling: Scaling) -> None:
    kinds = set(module._no_split_modules or ())
    layers = [name for name, child in module.named_modules() if type(child).__name__ in kinds]
    bare = [name for name in layers if not any(norm.startswith(f"{name}.") for norm in scaling.norms)]
    if bare or not layers:
        where = f"in {bare[0]} " if bare else ""
        raise _refusal(module, f"no norm {where}is read by matrices (it normalises after its matrices, or not at all)")


def _require_unchanged(module: PreTrainedModel, scaling: Scaling, tokens: Tensor) -> None:
    before = _logits(module, tokens)
    with _applied(module, scaling, PROBE_FACTOR):
        after = _logits(module, tokens)
    change = ((after - before).norm() / before.norm()).item()
    if not change <= (OFFSET_TOLERANCE[module.dtype] if any(scaling.norms.values()) else TOLERANCE):
        raise _refusal(
            module, f"its logits change by {change:.1e} of their size, so a norm is read by more than matrices"
        )


@contextmanager
def _applied(module: nn.Module, scaling: Scaling, s: float) -> Iterator[None]:
    """The model scaled by a power of two, and afterwards bit for bit what it was."""
    weights = {name: p.data for name, p in module.named_parameters()}
    kept = {name: weights[name].clone() for name in scaling.norms}
    scaling.apply(weights, s)
    try:
        yield
    finally:
        for name in scaling.matrices:
            weights[name].mul_(s)
        for name, weight in kept.items():
            weights[name].copy_(weight)


@torch.no_grad()
def _logits(module: nn.Module, tokens: Tensor) -> Tensor:
    return module(input_ids=tokens, use_cache=False).logits.float()


def _refusal(module: nn.Module, reason: str) -> ConfigError:
    return ConfigError(f"learner.update_scale does not work for {type(module).__name__}: {reason}")
