"""`lockstep analyze routing`: Section 3 of R3 on a checkpoint, a run or a tiny mixture made on the spot."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from lockstep.assembly.recipe import Recipe
from lockstep.assembly.roles import load_model
from lockstep.assembly.route_study import Prompt, study
from lockstep.cli.inference import ask_only, checkpoint_and_recipe, is_run, resolve_checkpoint
from lockstep.cli.options import require_folder_of_its_own
from lockstep.cli.warm_start import MIXTURE, continued, warmed_up
from lockstep.config import ConfigError, resolve
from lockstep.report.route_page import FIGURES, shown, write_route_study
from lockstep.report.route_study import RouteStudy
from lockstep.types import Message

PRECISION = "fp8_w8a8"  # of the tiny mixture's sampler, against a learner in high precision: something to see
FOLDER = "routing"


def analyze(
    checkpoint: str | None,
    overrides: Sequence[str],
    *,
    recipe: str | None,
    asked: Sequence[str],
    samples: int,
    answers: int,
    warmup: int,
    out: Path | None,
    console: Console,
) -> None:
    folder = out or (Path(checkpoint) / FOLDER if checkpoint and is_run(checkpoint) else Path(FOLDER))
    require_folder_of_its_own(folder)
    with TemporaryDirectory() as temporary, _progress(console) as bar:
        path, chosen = _found(checkpoint, overrides, recipe, asked, warmup, Path(temporary), bar)
        prompts = [[Message("user", text)] for text in asked] or _of_task(chosen, samples)
        tasks: dict[str, Any] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        loaded = load_model(chosen, path)
        name = checkpoint or "a tiny mixture"
        result = asyncio.run(study(chosen, loaded, prompts, name=name, answers=answers, tell=tell, checkpoint=path))
    console.print(table(result))
    page = write_route_study(result, folder)
    console.print(f"wrote {page}, study.json and {len(result.panels())} pictures", highlight=False, soft_wrap=True)


def _found(
    checkpoint: str | None,
    overrides: Sequence[str],
    recipe: str | None,
    asked: Sequence[str],
    warmup: int,
    folder: Path,
    bar: Progress,
) -> tuple[str, Recipe]:
    """The model to load and how it is run."""
    if checkpoint is None:
        return _tiny(overrides, warmup, folder, bar)
    if recipe is None and asked and not is_run(checkpoint):
        path = resolve_checkpoint(checkpoint)
        return path, resolve(Recipe, ask_only(path, checkpoint), overrides, "command line")[0]
    return checkpoint_and_recipe(checkpoint, overrides, recipe, bar.console)


def _tiny(overrides: Sequence[str], warmup: int, folder: Path, bar: Progress) -> tuple[str, Recipe]:
    task = bar.add_task(f"making a tiny mixture: {warmup} supervised updates", total=None)
    start = warmed_up(folder / "mixture", MIXTURE, warmup)
    bar.update(task, total=1, completed=1)
    low_bit = {"rollout": {"precision": PRECISION}, "learner": {"alignment": "none"}}
    return str(start), resolve(Recipe, continued(start, low_bit), overrides, "tiny mixture")[0]


def _of_task(recipe: Recipe, samples: int) -> list[Prompt]:
    found = recipe.task.build().samples("eval")[:samples]
    if not found:
        raise ConfigError(f"task {recipe.task.name!r} has no held-out samples: give prompts with --ask")
    return [sample.messages for sample in found]


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        yield bar


def table(study: RouteStudy) -> Table:
    facts = " · ".join(f"{name} {value}" for name, value in study.facts.items())
    found = Table("", title=Text(f"{study.model}\n{facts}"))
    for comparison in study.comparisons:
        found.add_column(comparison.label, justify="right")
    for name, label in FIGURES.items():
        found.add_row(label, *(shown(name, comparison.metrics.get(name)) for comparison in study.comparisons))
    return found
