"""Which device a run uses."""

from __future__ import annotations

import os

import torch

from lockstep.config import ConfigError


def choose_device(wanted: str, *, exact: bool = False) -> torch.device:
    """ConfigError if it is not here, or cannot be exact where that is asked for."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"unknown device {wanted!r}; choices: auto, cpu, cuda")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError('device = "cuda", but PyTorch sees no CUDA device; choices here: auto, cpu')
    if wanted == "cpu" or not torch.cuda.is_available():
        if exact:
            raise ConfigError(
                "rollout.exact = true needs a GPU, and PyTorch sees none (rollout.exact=false does without)"
            )
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))  # set by torchrun
