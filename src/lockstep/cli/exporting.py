"""`lockstep export`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from lockstep.assembly.export import export
from lockstep.cli.inference import checkpoint_and_recipe, is_run, resolve_checkpoint
from lockstep.config import ConfigError, Plugin, choices
from lockstep.quant import FORMATS


def export_checkpoint(checkpoint: str, out: Path, precision: str | None, console: Console) -> None:
    path = resolve_checkpoint(checkpoint)
    format = Plugin(package=FORMATS, name=precision) if precision else _sampled_in(checkpoint)
    done = export(path, out, format)
    source = "master weights" if done.from_masters else "weights"
    console.print(
        f"wrote {out}: {done.num_layers} weights in {format.name}, made from the checkpoint's {source}; "
        f"{done.num_bytes / 2**20:.1f} MiB; {done.readers} can load it",
        highlight=False,
        soft_wrap=True,
    )


def _sampled_in(checkpoint: str) -> Plugin:
    precision = checkpoint_and_recipe(checkpoint, (), None)[1].rollout.precision if is_run(checkpoint) else None
    if precision is None:
        formats = ", ".join(choices(FORMATS))
        raise ConfigError(f"{checkpoint} was not sampled from in low bits: choose a --precision out of {formats}")
    return precision
