"""`lockstep export`: a checkpoint, in the codes its run sampled with, as a compressed-tensors checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lockstep.assembly.devices import choose_device
from lockstep.config import ConfigError, Plugin
from lockstep.learner.checkpoint import read_masters
from lockstep.models import loading
from lockstep.models.export import save_compressed, scheme_of
from lockstep.models.loading import Loaded, ModelConfig
from lockstep.models.scaling import find_scaling
from lockstep.quant.encoded import Encoded
from lockstep.quant.format import Format
from lockstep.quant.layers import QuantizedLayer, quantized_layers


@dataclass(frozen=True, slots=True)
class Exported:
    num_layers: int  # quantized
    num_bytes: int  # of the folder
    from_masters: bool  # the codes are those of the run, made from float32 weights
    readers: str


def export(checkpoint: str, out: Path, precision: Plugin) -> Exported:
    """Quantizes the checkpoint's master weights, if it has them, else its weights; `out` must not exist yet."""
    if out.exists():
        raise ConfigError(f"{out} exists already")
    format: Format = precision.build()
    scheme = scheme_of(format)
    dtype = loading.read_config(checkpoint).dtype
    loaded = loading.load(
        ModelConfig(path=checkpoint),
        dtype=dtype if isinstance(dtype, torch.dtype) else torch.float32,
        device=choose_device("auto"),
        seed=0,
    )
    if spoilt := loading.nonfinite(dict(loaded.module.named_parameters())):
        raise ConfigError(f"cannot export {checkpoint!r}: {spoilt}")
    try:
        layers = quantized_layers(loaded.module)
    except ValueError as error:
        raise ConfigError(f"cannot export {checkpoint!r}: {error}") from error
    save_compressed(out, loaded, format, dict(encode_masters(Path(checkpoint), loaded, format, layers)))
    has_experts = any(layer.kind == "experts" for layer in layers)
    return Exported(
        num_layers=len(layers),
        num_bytes=sum(file.stat().st_size for file in out.iterdir()),
        from_masters=bool(read_masters(Path(checkpoint))[0]),
        readers="vLLM" if has_experts and not scheme.readable_experts else "vLLM and transformers",
    )


def encode_masters(
    checkpoint: Path, loaded: Loaded, format: Format, layers: Sequence[QuantizedLayer]
) -> Iterator[tuple[str, Encoded]]:
    """By name, codes of a checkpoint's master weights, or of its weights where it has none: what its run sampled with.

    An update scale is taken out of their scales, as it is out of the checkpoint.
    """
    masters, update_scale = read_masters(checkpoint)
    transformed = update_scale["factor"] != 1 and update_scale["by"] == "weights"
    scaled = find_scaling(loaded.module).matrices if transformed else ()
    for layer in layers:
        weight = masters.get(layer.name, loaded.module.get_parameter(layer.name).detach())
        encoded = format.quantize(weight.to(loaded.module.device))
        factor = update_scale["factor"] if layer.name in scaled else 1.0
        yield layer.name, replace(encoded, scales=encoded.scales * factor)
