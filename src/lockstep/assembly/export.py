"""`lockstep export`: a checkpoint, in the codes its run sampled with, as a compressed-tensors checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lockstep.assembly.devices import choose_device
from lockstep.config import ConfigError, Plugin
from lockstep.learner.checkpoint import FILE, read_masters
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
        from_masters=(Path(checkpoint) / FILE).is_file(),
        readers="vLLM" if has_experts and not scheme.readable_experts else "vLLM and transformers",
    )


def encode_masters(
    checkpoint: Path, loaded: Loaded, format: Format, layers: Sequence[QuantizedLayer]
) -> Iterator[tuple[str, Encoded]]:
    """By name, codes of a checkpoint's master weights, or of its weights where it has none: what its run sampled with.

    An update scale is taken out of their scales, as it is out of the checkpoint. ConfigError if a master is missing,
    has another shape than the model's weight, or holds NaN or inf.
    """
    own, masters = dict(loaded.module.named_parameters()), read_masters(checkpoint)
    weights = own if masters is None else masters.weights
    factor = 1.0 if masters is None or masters.update_scale["by"] != "weights" else masters.update_scale["factor"]
    scaled = find_scaling(loaded.module).matrices if factor != 1 else ()
    for name in (layer.name for layer in layers):
        if name not in weights or weights[name].shape != own[name].shape:
            raise ConfigError(f"{checkpoint / FILE} is damaged: its {name} is missing, or not of the model's shape")
        try:
            encoded = format.quantize(weights[name].detach().to(loaded.module.device))
        except ValueError as error:
            raise ConfigError(f"{name} of {checkpoint}: {error}") from error
        yield name, replace(encoded, scales=encoded.scales * (factor if name in scaled else 1.0))
