"""A tiny model that has learned a little: what is measured on where no checkpoint is at hand."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from lockstep.assembly.recipe import Recipe
from lockstep.assembly.run import train
from lockstep.cli import recipe_files
from lockstep.config.loading import read_tables, validate
from lockstep.report.run_folder import RunFolder

RECIPE = "quickstart"
MIXTURE: dict[str, int] = {"hidden": 128, "layers": 4, "heads": 4, "context": 128, "experts": 16}


def warmed_up(root: Path, shape: Mapping[str, int], updates: int) -> Path:
    """The checkpoint of a model that has seen so many batches of the quickstart's demonstrations: as peaked as one that
    has learned something."""
    given = read_tables(recipe_files.find(RECIPE))
    changes = {
        "device": "cpu",
        "model": {"init": shape},
        "warmup": given["warmup"] | {"steps": updates, "control": False},
        "train": {"steps": 0},
        "eval": {"samples": 0},
    }
    with redirect_stdout(io.StringIO()):
        train(validate(Recipe, given | changes, RECIPE), root, plain=True)
    found = RunFolder.open(root).result
    assert found is not None, "a run saves before its first step"
    return found


def continued(start: Path, changes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The quickstart from there on, as tables: without a warm-up, with some keys changed."""
    given = read_tables(recipe_files.find(RECIPE))
    del given["warmup"]
    common = {"device": "cpu", "model": {"path": str(start)}, "eval": {"samples": 0}}
    return given | common | {name: given.get(name, {}) | table for name, table in changes.items()}
