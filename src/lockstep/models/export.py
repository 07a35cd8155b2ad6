"""A model in a low-bit format as a compressed-tensors checkpoint, for vLLM and transformers to load.

The codes are the format's own, and so are its float32 scales (vLLM keeps those of int4 weights in the model's dtype,
which loses nothing in bfloat16: they are bfloat16 values, unless an update scale was taken out of them). How inputs are
quantized is said in config.json and done by the reader. Fused experts are split into the tensors of one expert each, by
transformers' own conversion.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lockstep.config import ConfigError
from lockstep.models.loading import Loaded, system_errors
from lockstep.quant.encoded import Encoded
from lockstep.quant.format import Format
from lockstep.quant.kernels.reference import GROUP, unpack_int4
from lockstep.quant.scheme import Scheme

CODES_PER_INT32 = 8


def scheme_of(format: Format) -> Scheme:
    """ConfigError for a format that compressed-tensors has no form for."""
    if format.scheme is None:
        raise ConfigError(f"{format} has no form in compressed-tensors that both vLLM and transformers load")
    return format.scheme


def save_compressed(folder: Path, loaded: Loaded, format: Format, encoded: Mapping[str, Encoded]) -> None:
    """Writes `encoded` in place of the weights it names, all other weights as they are, config and tokenizer.

    Aside, and then renamed: a folder that exists is whole. ConfigError if compressed-tensors cannot hold the format, or
    a weight in it; OSError with the folder on a full disk.
    """
    scheme = scheme_of(format)
    _refuse_ragged(scheme, encoded)
    kept = dict(_as_saved(loaded.shell, _others(loaded.module, encoded)))
    config = copy.deepcopy(loaded.shell.config)
    config.architectures, config.dtype = [type(loaded.shell).__name__], loaded.module.dtype
    config.quantization_config = _describe(scheme, _left_alone(loaded.module, kept, encoded))
    aside = folder.with_name(f".aside-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)  # of one that was killed
    try:
        with system_errors(folder):
            aside.mkdir(parents=True)
            config.save_pretrained(aside)
            if loaded.shell.generation_config is not None:
                loaded.shell.generation_config.save_pretrained(aside)
            loaded.tokenizer.save_pretrained(aside)
            tensors = kept | dict(_tensors(loaded.shell, scheme, encoded))
            save_torch_state_dict(tensors, aside, metadata={"format": "pt"})
            aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _refuse_ragged(scheme: Scheme, encoded: Mapping[str, Encoded]) -> None:
    for name, weight in encoded.items():
        *experts, rows, width = weight.shape
        if scheme.grouped and width % GROUP:
            raise ConfigError(
                f"{name} has {width} inputs: compressed-tensors wants whole groups of {GROUP}; int8_w8a8, and fp8_w8a8 "
                "without blocks, have no groups"
            )
        if experts and name.endswith("gate_up_proj") and rows % (2 * scheme.rows_per_scale):
            raise ConfigError(f"{name} is two matrices of {rows // 2} rows, which share a block of {GROUP} rows")


def _others(module: PreTrainedModel, encoded: Mapping[str, Encoded]) -> dict[str, Tensor]:
    """What stays as it is, tied weights once."""
    first: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        first.setdefault(id(tensor), (name, tensor.detach()))
    return {name: tensor for name, tensor in first.values() if name not in encoded}


def _left_alone(module: PreTrainedModel, kept: Mapping[str, Tensor], encoded: Mapping[str, Encoded]) -> list[str]:
    """Layers a reader must not take for quantized ones, by the names of modules and by those of the checkpoint.

    These may differ, and so may what a reader makes a linear layer: vLLM does so with routers.
    """
    linears = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    modules = [name for name in linears if f"{name}.weight" not in encoded]
    saved = [name.removesuffix(".weight") for name, t in kept.items() if t.ndim == 2 and name.endswith(".weight")]
    return sorted({*modules, *saved})


def _describe(scheme: Scheme, ignore: Sequence[str]) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {**scheme.weights, "dynamic": False},
        "input_activations": None if scheme.inputs is None else dict(scheme.inputs),
        "output_activations": None,
        "format": scheme.container,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": scheme.container,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def _tensors(shell: PreTrainedModel, scheme: Scheme, encoded: Mapping[str, Encoded]) -> Iterator[tuple[str, Tensor]]:
    """Codes and scales by their names in the checkpoint; each part of a fused weight goes the weight's own way."""
    packed = scheme.container == "pack-quantized"
    codes = dict(_as_saved(shell, {name: _codes(weight, packed) for name, weight in encoded.items()}))
    scales = dict(_as_saved(shell, {name: weight.scales for name, weight in encoded.items()}))
    for name, tensor in codes.items():
        owner = name.removesuffix(".weight")
        yield f"{owner}.weight_packed" if packed else name, tensor
        yield f"{owner}.weight_scale", scales[name].reshape(-(-len(tensor) // scheme.rows_per_scale), -1).contiguous()
        if packed:
            yield f"{owner}.weight_shape", torch.tensor([len(tensor), tensor.shape[1] * CODES_PER_INT32])


def _as_saved(shell: PreTrainedModel, named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Under the names, and cut into the pieces, that `save_pretrained` would give."""
    for name, tensor in revert_weight_conversion(shell, dict(named)).items():
        yield name, tensor.contiguous().clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _codes(weight: Encoded, packed: bool) -> Tensor:
    if weight.codes.dtype != torch.uint8:
        return weight.codes
    codes = unpack_int4(weight.codes, weight.shape[-1])
    if not packed:
        return codes
    nibbles = (codes + 8).to(torch.uint8)
    return (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).view(torch.int32)  # the first code in the lowest bits
