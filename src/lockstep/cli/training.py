"""`lockstep train`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from lockstep.assembly.estimate import GIB, checkpoint_gib, estimate
from lockstep.assembly.governed import held
from lockstep.assembly.recipe import Recipe
from lockstep.assembly.run import train as run_training
from lockstep.cli import recipe_files
from lockstep.cli.options import bytes_text, require_folder
from lockstep.config import ConfigError, resolve
from lockstep.config.layers import Stack
from lockstep.config.loading import read_tables
from lockstep.controller.checkpoints import Checkpoints
from lockstep.protocols import IDLE
from lockstep.report.run_folder import RunFolder


def train(
    recipe: str | None,
    overrides: Sequence[str],
    *,
    resume: Path | None,
    dry_run: bool,
    plain: bool,
    runs: Path,
    console: Console,
) -> None:
    chosen, layers, root = _choose(recipe, overrides, resume, runs)
    if dry_run:
        _show(chosen, layers, console)
        if resume is not None:
            _show_held(chosen, root, console)
        return
    if resume is not None:
        require_folder(resume)
    progress = run_training(chosen, root, resume=resume is not None, plain=plain)
    if progress is None:  # not rank 0
        return
    folder = RunFolder.open(root)
    console.print(f"done: {progress.step} steps", highlight=False)
    if idle := _idle(folder):
        console.print(f"warning: {idle}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    facts = {
        "accuracy": _accuracy(folder),
        "report": folder.report,
        "checkpoint": folder.result or "none could be saved",
    }
    lines = "\n".join(f"  {name:10}  {fact}" for name, fact in facts.items() if fact)
    console.print(lines, markup=False, highlight=False, soft_wrap=True)


def _show_held(recipe: Recipe, root: Path, console: Console) -> None:
    """What a run that goes on would do otherwise than its recipe says."""
    found = Checkpoints(RunFolder(root).checkpoints, recipe.checkpoint.keep).latest()
    if found and (kept := held(recipe, found[1])):
        console.print(f"# {kept}", markup=False, highlight=False, soft_wrap=True)


def _accuracy(folder: RunFolder) -> str:
    """Before and after, or when it was measured if only once; and what supervised learning alone reached in the same
    time, if that was measured."""
    rows = list(folder.read_metrics())
    measured = [(row["step"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]
    control = [row["control/accuracy"] for row in rows if "control/accuracy" in row]
    if not measured:
        return ""
    (first, before), (last, after) = measured[0], measured[-1]
    text = f"{before:.1%} -> {after:.1%} held out" if last > first else f"{after:.1%} held out, at step {last}"
    failed = [row["eval/failed"] for row in rows if "eval/failed" in row]
    if failed and failed[-1]:
        text += f", of those that could be judged (in the end not {failed[-1]:.0f})"
    return text + (f" (supervised learning alone: {control[-1]:.1%})" if control else "")


def _idle(folder: RunFolder) -> str:
    """What a reader should know before using the result: half of the steps or more moved no weight; else empty."""
    updates = [row["policy/updates"] for row in folder.read_metrics() if "policy/updates" in row]
    idle = updates.count(0)
    if not idle or 2 * idle < len(updates):
        return ""
    last = [event["text"] for event in folder.read_events() if event["kind"] == IDLE][-1]
    what = "the model is the one it began with" if idle == len(updates) else "the model has hardly learned"
    return f"{idle} of {len(updates)} steps moved no weight, {what} ({last.partition(': ')[2]})"


def _choose(
    recipe: str | None, overrides: Sequence[str], resume: Path | None, runs: Path
) -> tuple[Recipe, Stack, Path]:
    if resume is not None:
        given = [recipe, *overrides] if recipe else list(overrides)  # after --resume the first word is an override too
        if recipe and "=" not in recipe:
            raise ConfigError(f"--resume takes overrides, such as train.steps=100, and no recipe: {recipe!r}")
        folder = RunFolder.open(resume)
        tables = folder.read_config()
        if not tables:
            raise ConfigError(
                f"{folder.config} is missing: put it back, or start a new run from model.path={folder.result}"
                if folder.result
                else f"{resume} was killed before it began: remove the folder and start again"
            )
        return *resolve(Recipe, tables, given, str(folder.config)), resume
    if recipe is None:
        raise ConfigError("name a recipe, such as `lockstep train quickstart`, or a run with --resume")
    path = recipe_files.find(recipe)
    chosen, layers = resolve(Recipe, read_tables(path), overrides, str(path))
    return chosen, layers, runs / chosen.name


def _show(recipe: Recipe, layers: Stack, console: Console) -> None:
    """The recipe with everything its method brings along and, as comments, what it needs: TOML to be trained from."""
    needed = estimate(recipe)
    whole = recipe.model_copy(update={"algorithm": recipe.algorithm.written_out()})
    usual = f"usual with {recipe.algorithm.surrogate.name}"
    unset = {f"algorithm.{key}" for key, value in recipe.algorithm if value is None}
    resolved = to_toml(
        whole.model_dump(mode="json", exclude_none=True),
        origin=lambda key: usual if unset & {key, key.rpartition(".")[0]} else layers.origin(key),
    )
    console.print(resolved, markup=False, highlight=False, soft_wrap=True)
    console.print(_memory(needed), markup=False, highlight=False)
    console.print(_disk(recipe), markup=False, highlight=False)


def _memory(parts: Mapping[str, float]) -> str:
    rows = {name: gib for name, gib in parts.items() if gib} | {"together": sum(parts.values())}
    return "\n".join(["", "# memory, about:", *_lines(rows)])


def _disk(recipe: Recipe) -> str:
    """The newest checkpoints are kept, the best one, and all of them while another one is written."""
    each, most = checkpoint_gib(recipe), recipe.checkpoint.keep + 2
    return "\n".join(["", "# disk, about:", *_lines({"a checkpoint": each, f"{most} of them, at most": most * each})])


def _lines(rows: Mapping[str, float]) -> Iterator[str]:
    """Comments of a recipe: GiB by name."""
    return (f"#   {name:36} {bytes_text(gib * GIB):>10}" for name, gib in rows.items())


def to_toml(tables: Mapping[str, Any], prefix: str = "", origin: Callable[[str], str | None] = lambda key: None) -> str:
    """Nested tables as TOML, each key with where it came from, if that is known."""
    lines = []
    for key, value in tables.items():
        if not isinstance(value, Mapping):
            comment = origin(prefix + key)
            lines.append(f"{key} = {_value(value)}" + (f"  # {comment}" if comment else ""))
    for key, value in tables.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{prefix}{key}]", to_toml(value, f"{prefix}{key}.", origin)]
    return "\n".join(lines)


def _value(value: object) -> str:
    """On one line. Plain values are as JSON writes them, which TOML reads the same way."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_value(inner)}" for key, inner in value.items()) + "}"
    return f"[{', '.join(map(_value, value))}]" if isinstance(value, list) else json.dumps(value)
