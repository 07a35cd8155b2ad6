"""`lockstep export`."""

from __future__ import annotations

import json
import re
from pathlib import Path

from rich.console import Console

from lockstep.assembly.export import export
from lockstep.cli.inference import checkpoint_and_recipe, is_run, resolve_checkpoint
from lockstep.cli.options import bytes_text
from lockstep.config import ConfigError, Plugin, choices
from lockstep.config.layers import parse_value
from lockstep.config.plugins import Chooser
from lockstep.quant import FORMATS


def export_checkpoint(checkpoint: str, out: Path, precision: str | None, console: Console) -> None:
    path = resolve_checkpoint(checkpoint)
    format = parse_format(precision) if precision else _sampled_in(checkpoint, console)
    done = export(path, out, format)
    source = "master weights" if done.from_masters else "weights"
    console.print(
        f"wrote {out}: {done.num_layers} weights in {_in_words(format)}, made from the checkpoint's {source}; "
        f"{bytes_text(done.num_bytes)}; {done.readers} can load it",
        highlight=False,
        soft_wrap=True,
    )


def parse_format(text: str) -> Plugin:
    """`fp8_w8a8`, or with options `fp8_w8a8:block=true`; checked as a recipe's would be."""
    name, *settings = re.split(r":(?=\w+=)", text)  # a class of one's own has a colon in its name
    options = {key: parse_value(value) for key, _, value in (setting.partition("=") for setting in settings)}
    chosen = Chooser(FORMATS)({"name": name, **options})
    assert isinstance(chosen, Plugin)
    return chosen


def _in_words(format: Plugin) -> str:
    options = ", ".join(f"{key} = {json.dumps(value)}" for key, value in format.options.items())
    return f"{format.name} ({options})" if options else format.name


def _sampled_in(checkpoint: str, console: Console) -> Plugin:
    found = checkpoint_and_recipe(checkpoint, (), None, console)[1] if is_run(checkpoint) else None
    precision = found.rollout.precision if found else None
    if precision is None:
        formats = ", ".join(choices(FORMATS))
        raise ConfigError(f"{checkpoint} was not sampled from in low bits: choose a --precision out of {formats}")
    return precision
