"""Tiny models to measure on where no checkpoint is at hand: one that has learned a little, and one drawn at random."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from lockstep.assembly.recipe import Recipe
from lockstep.assembly.run import train
from lockstep.cli import recipe_files
from lockstep.cli.rollout_processes import ended_by_signals
from lockstep.config.loading import read_tables, validate
from lockstep.models import loading
from lockstep.models.loading import Loaded
from lockstep.models.tiny import TinyModel, byte_tokenizer, tiny_model
from lockstep.report.run_folder import RunFolder

RECIPE = "quickstart"
MIXTURE: dict[str, int] = {"hidden": 128, "layers": 4, "heads": 4, "context": 128, "experts": 16}


def warmed_up(
    root: Path,
    shape: Mapping[str, int],
    updates: int,
    seed: int = 0,
    task: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> Path:
    """The checkpoint of a model that has seen so many batches of the quickstart's demonstrations: as peaked as one that
    has learned something. `task` changes its keys."""
    given = read_tables(recipe_files.find(RECIPE))
    fixed = {
        "device": device,
        "seed": seed,
        "model": {"init": shape},
        "task": given["task"] | (task or {}),
        "warmup": given["warmup"] | {"steps": updates, "control": False},
        "train": {"steps": 0},
        "eval": {"samples": 0},
    }
    with redirect_stdout(io.StringIO()), ended_by_signals():  # as the caller's, whose handlers a run does not put back
        train(validate(Recipe, given | fixed, RECIPE), root, plain=True)
    found = RunFolder.open(root).result
    assert found is not None, "a run saves before its first step"
    return found


def drawn(root: Path, shape: Mapping[str, int], std: float) -> Path:
    """A checkpoint whose matrices are all drawn anew, so large that distributions are peaked and that what one expert
    does has nothing to do with what another does."""
    module, generator = tiny_model(TinyModel.model_validate(shape), seed=0), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, std, generator=generator)
    loading.save(root, Loaded.of(module, byte_tokenizer()), dict(module.named_parameters()))
    return root


def continued(start: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The quickstart from there on, as tables: without a warm-up, with some keys changed."""
    given = read_tables(recipe_files.find(RECIPE))
    del given["warmup"]
    common = {"device": "cpu", "model": {"path": str(start)}, "eval": {"samples": 0}}
    return given | common | {key: _over(given.get(key), value) for key, value in changes.items()}


def _over(before: Any, value: Any) -> Any:
    """A table changes keys of the one before; anything else takes its place."""
    return {**before, **value} if isinstance(before, Mapping) and isinstance(value, Mapping) else value
