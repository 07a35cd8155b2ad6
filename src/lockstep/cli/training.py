"""`lockstep train`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lockstep.assembly.estimate import estimate
from lockstep.assembly.recipe import Recipe
from lockstep.assembly.run import train as run_training
from lockstep.cli import recipe_files
from lockstep.config import ConfigError, load
from lockstep.config.loading import override_tables, validate
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
    chosen, root = _choose(recipe, overrides, resume, runs)
    if dry_run:
        _show(chosen, console)
        return
    progress = run_training(chosen, root, resume=resume is not None, plain=plain)
    if progress is None:  # not rank 0
        return
    folder = RunFolder.open(root)
    console.print(f"done: {progress.step} steps{_accuracy(folder)}", highlight=False, soft_wrap=True)
    places = f"  report      {folder.report}\n  checkpoint  {folder.result or 'none could be saved'}"
    console.print(places, markup=False, highlight=False, soft_wrap=True)


def _accuracy(folder: RunFolder) -> str:
    """Before and after, and what supervised learning alone reached in the same time, if that was measured."""
    rows = list(folder.read_metrics())
    measured = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    control = [row["control/accuracy"] for row in rows if "control/accuracy" in row]
    if not measured:
        return ""
    text = f"; held-out accuracy {measured[0]:.1%} -> {measured[-1]:.1%}"
    return text + (f" (supervised learning alone: {control[-1]:.1%})" if control else "")


def _choose(recipe: str | None, overrides: Sequence[str], resume: Path | None, runs: Path) -> tuple[Recipe, Path]:
    if resume is not None:
        given = [recipe, *overrides] if recipe else list(overrides)  # after --resume the first word is an override too
        folder = RunFolder.open(resume)
        tables = folder.read_config()
        if not tables:
            raise ConfigError(f"{resume} was killed before it began: remove the folder and start again")
        tables = override_tables(tables, given)
        return validate(Recipe, tables, str(folder.config)), resume
    if recipe is None:
        raise ConfigError("name a recipe, such as `lockstep train quickstart`, or a run with --resume")
    chosen = load(Recipe, recipe_files.find(recipe), overrides)
    return chosen, runs / chosen.name


def _show(recipe: Recipe, console: Console) -> None:
    console.print(to_toml(recipe.model_dump(mode="json", exclude_none=True)), markup=False, highlight=False)
    parts = estimate(recipe)
    table = Table(title="memory, about", show_header=False)
    for name, gib in parts.items():
        table.add_row(name, f"{gib:.2f} GiB")
    table.add_section()
    table.add_row("together", f"{sum(parts.values()):.2f} GiB")
    console.print(table)


def to_toml(tables: Mapping[str, Any], prefix: str = "") -> str:
    """Nested tables as TOML; values as JSON writes them, which TOML reads the same way."""
    import json

    plain = {k: v for k, v in tables.items() if not isinstance(v, Mapping)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in plain.items()]
    for key, value in tables.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{prefix}{key}]", to_toml(value, f"{prefix}{key}.")]
    return "\n".join(lines)
