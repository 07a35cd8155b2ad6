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
    format = Plugin(package=FORMATS, name=precision) if precision else _sampled_in(checkpoint, console)
    done = export(path, out, format)
    source = "master weights" if done.from_masters else "weights"
    console.print(
        f"wrote {out}: {done.num_layers} weights in {format.name}, made from the checkpoint's {source}; "
        f"{done.num_bytes / 2**20:.1f} MiB; {done.readers} can load it",
        highlight=False,
        soft_wrap=True,
    )


def _sampled_in(checkpoint: str, console: Console) -> Plugin:
    found = checkpoint_and_recipe(checkpoint, (), None, console)[1] if is_run(checkpoint) else None
    precision = found.rollout.precision if found else None
    if precision is None:
        formats = ", ".join(choices(FORMATS))
        raise ConfigError(f"{checkpoint} was not sampled from in low bits: choose a --precision out of {formats}")
    return precision
