"""`lockstep doctor`: what is here, what would be used, and why not something faster."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from importlib.util import find_spec

import torch
from rich.console import Console
from rich.table import Table

from lockstep import __version__
from lockstep.assembly.devices import choose_device
from lockstep.config import choices
from lockstep.learner.config import LearnerConfig

CORE = ("torch", "transformers", "safetensors", "pydantic", "datasets", "math-verify")
OPTIONAL = {  # module -> (how to get it, what for)
    "trl": ('pip install "lockstep-rl\\[bench]"', "lockstep bench trl"),
    "wandb": ("pip install wandb", "record.wandb = true"),
}
UNUSED = ("vllm", "sglang", "ray")  # often there; that nothing here is faster for it is worth saying


def examine(console: Console) -> None:
    device = choose_device("auto")
    console.print(_versions(), _optional(), _choices(device))


def _versions() -> Table:
    table = Table(title="installed", show_header=False)
    table.add_row("lockstep", __version__)
    table.add_row("python", platform.python_version())
    for package in CORE:
        table.add_row(package, metadata.version(package))
    return table


def _optional() -> Table:
    table = Table("package", "", "for", title="optional")
    for module, (how, purpose) in OPTIONAL.items():
        here = find_spec(module) is not None
        table.add_row(module, "[green]yes[/green]" if here else f"no: {how}", purpose)
    for module in UNUSED:
        if find_spec(module) is not None:
            table.add_row(module, "yes", "nothing: not used by this version")
    return table


def _choices(device: torch.device) -> Table:
    dtype = LearnerConfig().torch_dtype(device)
    table = Table("what", "used", "why not something faster", title="a run here would use")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {os.cpu_count()} cores"
    no_gpu = "" if device.type == "cuda" else _why_no_gpu()
    table.add_row("device", name, no_gpu)
    half = (
        "" if dtype != torch.float32 else "float32 on a CPU: bfloat16 is slower there on most machines, and less exact"
    )
    table.add_row("precision", str(dtype).removeprefix("torch."), half)
    fused = device.type == "cuda" and dtype != torch.float32
    table.add_row(
        "learner attention",
        "the engine's kernel, and flash attention backward" if fused else "padded buckets over PyTorch's SDPA",
        "" if fused else "the fused kernel needs CUDA and half precision",
    )
    engines = choices("lockstep.rollout.engines")
    only = "" if len(engines) > 1 else "the only engine of this version"
    table.add_row("rollout engine", ", ".join(engines), only)
    table.add_row("threads", str(torch.get_num_threads()), "")
    return table


def _why_no_gpu() -> str:
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is a CPU build"
    return "PyTorch sees no CUDA device (driver missing, or CUDA_VISIBLE_DEVICES hides it)"
