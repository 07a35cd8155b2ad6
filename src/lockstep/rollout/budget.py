"""How much memory keys and values may take where a recipe does not say."""

from __future__ import annotations

import os

import torch

from lockstep.rollout.config import RolloutConfig

CPU_GIB = 2.0
SHARE = 0.85  # the rest is for what a step computes and for captured graphs
FLOOR = 0.1  # of what is free, even where a learner may want it all


def kv_gib(config: RolloutConfig, device: torch.device, leave_gib: float = 0.0) -> float:
    """On a GPU a share of what is free now, less what others are going to take: a preemption costs more than memory
    that lies idle."""
    if config.kv_gib is not None:
        return config.kv_gib
    if device.type != "cuda":
        return CPU_GIB
    free = free_gib(device)
    return max(SHARE * (free - leave_gib), FLOOR * free)


def require_memory(num_bytes: int, device: torch.device) -> None:
    """MemoryError for more than a CPU's machine has at all: some systems promise that and then kill who uses it."""
    if device.type == "cpu" and num_bytes / 2**30 > _machine_gib():
        raise MemoryError


def _machine_gib() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def room(device: torch.device) -> str:
    """How much there is, in words."""
    return (
        f"{free_gib(device):.1f} GiB are free"
        if device.type == "cuda"
        else f"this machine has {_machine_gib():.1f} GiB"
    )


def free_gib(device: torch.device) -> float:
    """With what PyTorch holds and does not use."""
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (torch.cuda.mem_get_info(device)[0] + idle) / 2**30
