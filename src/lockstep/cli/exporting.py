"""`lockstep export`."""

from __future__ import annotations

import json
import re
from pathlib import Path

from rich.console import Console

from lockstep.assembly.export import export
from lockstep.cli.inference import resolve_checkpoint
from lockstep.cli.options import bytes_text, require_folder_of_its_own
from lockstep.config import ConfigError, Plugin, choices
from lockstep.config.layers import parse_value
from lockstep.config.plugins import Chooser
from lockstep.learner.checkpoint import sampled_in
from lockstep.quant import FORMATS


def export_checkpoint(checkpoint: str, out: Path, precision: str | None, console: Console) -> None:
    require_folder_of_its_own(out)
    path = resolve_checkpoint(checkpoint)
    format = parse_format(precision) if precision else _sampled_in(path)
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
    known, _, option = name.partition(":")
    if option and known in choices(FORMATS):
        raise ConfigError(f"{text}: the option {option!r} has no value, such as {option}=true")
    options = {key: parse_value(value) for key, _, value in (setting.partition("=") for setting in settings)}
    chosen = Chooser(FORMATS)({"name": name, **options})
    assert isinstance(chosen, Plugin)
    return chosen


def _in_words(format: Plugin) -> str:
    options = ", ".join(f"{key} = {json.dumps(value)}" for key, value in format.options.items())
    return f"{format.name} ({options})" if options else format.name


def _sampled_in(checkpoint: str) -> Plugin:
    choose = f"choose a --precision out of {', '.join(choices(FORMATS))}"
    try:
        precision = sampled_in(Path(checkpoint))
    except FileNotFoundError:
        raise ConfigError(f"{checkpoint} does not tell in which precision it was sampled from: {choose}") from None
    if precision is None:
        raise ConfigError(f"{checkpoint} was not sampled from in low bits: {choose}")
    format = Chooser(FORMATS)(precision)
    assert isinstance(format, Plugin)
    return format
