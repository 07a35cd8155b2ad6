"""Hugging Face checkpoints in and out. What is loaded is complete, or it is refused with one line that says why."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import model_validator
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lockstep.config import Config, ConfigError
from lockstep.models.tiny import TinyModel, byte_tokenizer, tiny_model


class ModelConfig(Config):
    """Which model is trained."""

    path: str = ""
    """a Hugging Face checkpoint: a folder or a hub name"""
    init: TinyModel | None = None
    """or make a tiny model on the spot, with a byte-level tokenizer"""

    @model_validator(mode="after")
    def _one_of(self) -> ModelConfig:
        if bool(self.path) == (self.init is not None):
            raise ValueError("give exactly one of `path` and `init`")
        return self


@dataclass(frozen=True, slots=True)
class Loaded:
    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    shell: PreTrainedModel  # the module as it was loaded, without its weights: what a checkpoint is saved through

    @classmethod
    def of(cls, module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Loaded:
        memo: dict[int, Any] = {id(p): nn.Parameter(p.to("meta"), requires_grad=False) for p in module.parameters()}
        return cls(module, tokenizer, copy.deepcopy(module, memo))

    @property
    def context(self) -> int:
        return int(self.module.config.get_text_config().max_position_embeddings)


def load(config: ModelConfig, *, dtype: torch.dtype, device: torch.device, seed: int) -> Loaded:
    if config.init is not None:
        return Loaded.of(tiny_model(config.init, seed).to(device=device, dtype=dtype), byte_tokenizer())
    return Loaded.of(_load_module(config.path, dtype).to(device), _load_tokenizer(config.path))


def _load_module(path: str, dtype: torch.dtype) -> PreTrainedModel:
    _check_folder(path)
    try:
        module, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"cannot load the model at {path!r}: {_first_line(error)}") from None
    _refuse_incomplete(path, info)
    return module.eval()


def _check_folder(path: str) -> None:
    """A path that looks local is never taken for a hub name: the error would speak of the wrong thing."""
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"no model at {path!r}: the folder has no config.json")
    elif folder.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ConfigError(f"no model at {path!r}: no such folder")


def _refuse_incomplete(path: str, info: Mapping[str, Any]) -> None:
    """transformers fills missing weights with random ones and goes on; that would be wrong and silent."""
    for kind in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, info.get(kind) or ())):
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ConfigError(f"the checkpoint at {path!r} has {kind.replace('_', ' ')}: {', '.join(names[:3])}{more}")


def _load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot load the tokenizer at {path!r}: {_first_line(error)}") from None


def save(folder: Path, loaded: Loaded, weights: Mapping[str, Tensor]) -> None:
    """Writes weights (by Hugging Face name), config, generation config and tokenizer, for plain transformers to load.

    The learner has changed its own module (attention, head, config), so it is saved through the shell.
    """
    loaded.shell.save_pretrained(folder, state_dict=dict(weights))
    loaded.tokenizer.save_pretrained(folder)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
