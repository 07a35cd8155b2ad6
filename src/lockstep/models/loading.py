"""Hugging Face checkpoints in and out. What is loaded is complete, or it is refused with one line that says why."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import model_validator
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from lockstep.config import Config, ConfigError
from lockstep.config.paths import given_path
from lockstep.models.head import keep_logits
from lockstep.models.tiny import TinyModel, byte_tokenizer, tiny_model

TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken")


class CheckpointError(ConfigError):
    """Something is there, and it cannot be loaded."""


class ModelConfig(Config):
    """Which model is trained: exactly one of `path` and `init`."""

    path: str = ""
    """a Hugging Face checkpoint: a folder or a hub name"""
    init: TinyModel | None = None
    """or make a tiny model on the spot, with a byte-level tokenizer"""
    float32_logits: bool = False
    """of a bfloat16 model: logits are not rounded to its dtype, neither in sampling nor in learning; slow on a CPU"""

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
    """Parameters in `dtype`, save those the model itself keeps in float32; buffers (rotary tables) as they are."""
    if config.init is not None:
        module, tokenizer = tiny_model(config.init, seed), byte_tokenizer()
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)
    else:
        with quietly():
            module, tokenizer = _load_module(config.path, dtype), load_tokenizer(config.path)
    nn.Module.to(module, device)
    if config.float32_logits:
        keep_logits(module)
    return Loaded.of(module, tokenizer)


def read_config(path: str) -> PreTrainedConfig:
    """The config of a checkpoint in high precision, without its weights."""
    with given_path(f"no model at {path!r}"):
        _check_folder(path)
    try:
        config = AutoConfig.from_pretrained(path)
    except Exception as error:  # as below
        raise CheckpointError(f"cannot load the model at {path!r}: {_one_line(error)}") from error
    if getattr(config, "quantization_config", None):
        raise ConfigError(
            f"{path!r} is already quantized; exports are for vLLM and transformers: name the high-precision checkpoint"
        )
    return config


def _load_module(path: str, dtype: torch.dtype) -> PreTrainedModel:
    read_config(path)  # refuses what has no config, or another than we can run
    try:
        module, info = cast(
            "tuple[PreTrainedModel, dict[str, Any]]",
            AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation="sdpa",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they come back in `info`, by name, and are refused below
            ),
        )
    except Exception as error:  # a broken checkpoint surfaces as almost anything
        reason = _damaged_file(path) or _one_line(error)
        raise CheckpointError(f"cannot load the model at {path!r}: {reason}") from error
    _refuse_incomplete(path, info)
    return module.eval()


def _check_folder(path: str) -> None:
    """A path that looks local is never taken for a hub name: the error would speak of the wrong thing."""
    folder = Path(path)
    if (folder / "metrics.jsonl").is_file():
        raise ConfigError(f"{path} is a run; name one of its checkpoints")
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"no model at {path!r}: the folder has no config.json")
    elif folder.exists() or _looks_local(path):
        raise ConfigError(f"no model at {path!r}: no such folder")


def _looks_local(path: str) -> bool:
    """`runs/gone` too, where there is a folder `runs`: asking the hub takes long and tells nothing."""
    first, slash, _ = path.partition("/")
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or (bool(slash) and Path(first).is_dir())


def _damaged_file(path: str) -> str | None:
    """The first file of weights, if any, that is not what its header says."""
    for file in sorted(Path(path).glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError as error:
            return f"{file.name} is damaged, or a copy that was cut short ({_one_line(error)})"
    return None


def _refuse_incomplete(path: str, info: Mapping[str, Any]) -> None:
    """transformers fills missing weights with random ones and goes on; that would be wrong and silent."""
    wrong = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    wrong += [
        f"{name} is {tuple(found)}, its config says {tuple(expected)}"
        for name, found, expected in sorted(info["mismatched_keys"])
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(f"the checkpoint at {path!r} is not whole: {', '.join(wrong[:3])}{more}")


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # as above
        missing = Path(path).is_dir() and not any(any(Path(path).glob(name)) for name in TOKENIZER_FILES)
        reason = f"the folder has none of {', '.join(TOKENIZER_FILES)}" if missing else _one_line(error)
        raise CheckpointError(f"cannot load the tokenizer at {path!r}: {reason}") from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # what transformers makes of no files at all
        raise CheckpointError(f"cannot load the tokenizer at {path!r}: it has no vocabulary; are its files missing?")
    return tokenizer


def save(folder: Path, loaded: Loaded, weights: Mapping[str, Tensor]) -> None:
    """Writes weights (by Hugging Face name), config, generation config and tokenizer, for plain transformers to load.

    The learner has changed its own module (attention, head, config), so it is saved through the shell.
    FloatingPointError if one is inf or NaN: such a model answers nothing. OSError with the folder if the disk is full.
    """
    if spoilt := nonfinite(weights):
        raise FloatingPointError(f"not saved, for the model is broken: {spoilt}; an earlier checkpoint may be whole")
    with quietly(), system_errors(folder):
        loaded.shell.save_pretrained(folder, state_dict=dict(weights))
        loaded.tokenizer.save_pretrained(folder)


def nonfinite(weights: Mapping[str, Tensor]) -> str:
    """In words, the weights that are inf or NaN somewhere; empty if none is."""
    spoilt = [name for name, weight in weights.items() if not bool(weight.isfinite().all())]
    return f"{len(spoilt)} of {len(weights)} weights are inf or NaN, such as {spoilt[0]}" if spoilt else ""


@contextmanager
def system_errors(folder: Path) -> Iterator[None]:
    """safetensors and tokenizers, written in Rust, raise errors of their own that end in `(os error 28)`."""
    try:
        yield
    except Exception as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        number = error.errno if isinstance(error, OSError) else int(found[1]) if found else None
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(folder)) from error


@contextmanager
def quietly() -> Iterator[None]:
    """transformers' bars and load reports would run through what a command shows; what matters is raised."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
