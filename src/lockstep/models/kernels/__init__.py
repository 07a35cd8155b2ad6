"""Triton kernels of a model's two views, the engine's and the learner's."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch


@cache
def available(device: torch.device) -> bool:
    """On CUDA, where triton comes with torch; elsewhere only under its interpreter, which is for tests."""
    return find_spec("triton") is not None and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


def attends(size: int) -> bool:
    """The kernels of attention want heads whose size is a power of two of at least 16."""
    return size >= 16 and size & (size - 1) == 0
