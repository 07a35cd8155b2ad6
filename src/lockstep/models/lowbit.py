"""The quantized matrices of a model: made once per update, from the master weights, for everyone who runs them.

The learner's forward, the publication and, where it shares the learner's memory, the engine read the same tensors.
Whoever quantized a second time, or from rounded weights, would run another model.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lockstep.config import ConfigError, Plugin
from lockstep.models.fused import TOGETHER
from lockstep.quant.encoded import Encoded, stack, stackable
from lockstep.quant.format import Format
from lockstep.quant.layers import QuantizedLayer, quantized_layers
from lockstep.quant.modules import install, install_straight_through

LAYER = re.compile(r"\.(\d+)\.")


class LowBitWeights:
    """Encoded weights by Hugging Face name, refreshed in place after every update."""

    def __init__(self, module: PreTrainedModel, precision: Plugin, *, updates_per_version: int = 1) -> None:
        """Of a module as it was loaded. ConfigError if one of its matrices cannot be quantized.

        With several updates per version the last published codes are kept too, to count those that changed.
        """
        self.precision = precision
        self.format: Format = precision.build()
        self.layers = low_bit_layers(module, precision)
        weights = dict(module.named_parameters())
        with _refused(precision):
            made = {layer.name: self.format.quantize(weights[layer.name].detach()) for layer in self.layers}
        self.encoded = _together(made)
        self.in_forward = False  # the learner's own, which then needs them after every update
        self._published = _copies(self.encoded) if updates_per_version > 1 else None
        self._changed: dict[str, Tensor] = {}

    def run_by_engine(self, view: PreTrainedModel, *, share: bool) -> None:
        """The engine's view computes on these tensors, or on copies of its own."""
        install(view, self.layers, self.format, self.encoded if share else _together(_copies(self.encoded)))

    def run_by_learner(self, module: PreTrainedModel) -> None:
        """The learner's forward computes on these tensors; its parameters keep their names and get the gradients."""
        install_straight_through(module, self.layers, self.format, self.encoded.__getitem__)
        self.in_forward = True

    def take(self, encoded: Iterable[tuple[str, Encoded]]) -> None:
        """Other codes for the same weights, such as those that float32 masters have where the module is rounded."""
        for name, made in encoded:
            self.encoded[name].copy_(made)

    @torch.no_grad()
    def refresh(self, masters: Mapping[str, Tensor]) -> None:
        """Quantizes the masters as they are now; under FSDP2 every rank must call it.

        FloatingPointError if one holds NaN or inf: the codes are then of no use. Waits for the device, once.
        """
        finite = []
        for name, held in self.encoded.items():
            made = self.format.encode_weight(_whole(masters[name].detach()))
            self._changed[name] = made.changed(self._published[name] if self._published else held)
            held.copy_(made)
            finite.append(made.finite)
        bad = [name for name, good in zip(self.encoded, torch.stack(finite).tolist(), strict=True) if not good]
        if bad:
            raise FloatingPointError(f"cannot quantize {bad[0]}: it holds NaN or inf, so the model has diverged")

    def publish(self) -> dict[str, Tensor]:
        """What the engine loads in place of the matrices: the live tensors, `NAME.codes` and `NAME.scales`."""
        if self._published:
            for name, held in self._published.items():
                held.copy_(self.encoded[name])
        self._changed = {name: torch.zeros((), device=e.codes.device) for name, e in self.encoded.items()}
        return {f"{name}.{part}": t for name, e in self.encoded.items() for part, t in e.tensors.items()}

    def metrics(self) -> dict[str, float]:
        """What the engine runs in and, since the last publication, the share of codes that changed, by layer too."""
        shares = torch.stack(list(self._changed.values())).tolist()
        found: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        for name, share in zip(self._changed, shares, strict=True):
            weighed = (share, math.prod(self.encoded[name].shape))
            found["quant/changed"].append(weighed)
            if layer := LAYER.search(name):
                found[f"quant/changed/layer{layer[1]}"].append(weighed)
        return {"quant/bits": float(self.format.bits), **{key: _mean(values) for key, values in found.items()}}


def low_bit_layers(module: PreTrainedModel, precision: Plugin) -> list[QuantizedLayer]:
    """What a rollout in `precision` quantizes; ConfigError if something cannot be."""
    with _refused(precision):
        return quantized_layers(module)


@contextmanager
def _refused(precision: Plugin) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"rollout.precision = {precision.name!r}: {error}") from error


def _copies(encoded: Mapping[str, Encoded]) -> dict[str, Encoded]:
    return {name: replace(e, codes=e.codes.clone(), scales=e.scales.clone()) for name, e in encoded.items()}


def _together(encoded: Mapping[str, Encoded]) -> dict[str, Encoded]:
    """The same, weights that read one input side by side in memory: the engine multiplies with all of them at once."""
    laid = dict(encoded)
    for names in _sharing_inputs(encoded):
        parts = [encoded[name] for name in names]
        if stackable(parts):
            laid.update(zip(names, stack(parts)[1], strict=True))
    return laid


def _sharing_inputs(names: Collection[str]) -> Iterator[list[str]]:
    """Of weights: q, k and v of one module, or gate and up."""
    for first in names:
        path, _, leaf = first.removesuffix(".weight").rpartition(".")
        for group in TOGETHER:
            siblings = [f"{path}.{name}.weight" for name in group]
            if leaf == group[0] and all(name in names for name in siblings):
                yield siblings


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _mean(weighed: list[tuple[float, int]]) -> float:
    return sum(share * size for share, size in weighed) / sum(size for _, size in weighed)
