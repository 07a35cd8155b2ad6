"""`lockstep bench scaling`: what update-aware scaling does to low-bit codes, at once and over RL steps.

A tiny model is warmed up once. Then the scale is applied and codes are compared; and RL goes on from the same weights
in three arms: as they are, with scaled weights, and with scaled learning rates. Same prompts, same seeds.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lockstep.assembly.recipe import Recipe
from lockstep.assembly.run import train
from lockstep.cli import recipe_files
from lockstep.config import ConfigError, choices, resolve
from lockstep.config.loading import read_tables
from lockstep.config.plugins import load_class
from lockstep.learner.checkpoint import read_masters
from lockstep.models.loading import ModelConfig, load
from lockstep.models.scaling import Scaling, find_scaling
from lockstep.quant import FORMATS
from lockstep.quant.format import Format
from lockstep.quant.layers import quantized_layers
from lockstep.report.run_folder import RunFolder

RECIPE = "quickstart"
ARMS = ("none", "weights", "rates")
# Adam, as in the paper. No clipping: a scale changes the norm of the gradient, and not what it says.
LEARNER = {"optimiser": "adamw", "learning_rate": 1e-4, "clip_norm": None}
KEEP_ALL = {"every": 1, "keep": 9999}
OWN = "model", "checkpoint", "train.steps", "rollout.precision", "learner.update_scale", "eval.every", "warmup.control"

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Matrices:
    """Names of the quantized ones."""

    scaled: list[str]  # they read a norm
    others: list[str]


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    scaled: float  # share of the codes of scaled matrices that a publication changes, mean over steps
    others: float  # the same of the others
    reward: float  # mean over the second half of the steps
    accuracy: float  # held-out, after the last
    last: Weights


def compare(*, scale: float, steps: int, precision: str, overrides: Sequence[str], console: Console) -> None:
    for key in (override.partition("=")[0] for override in overrides):
        if key.startswith(OWN):
            raise ConfigError(f"bench scaling sets {key} itself: --scale, --steps and --precision are what it varies")
    format: Format = load_class(FORMATS, precision)()
    in_rl = [override for override in overrides if not override.startswith("warmup.")]
    with TemporaryDirectory() as folder, console.status("warming up") as status:
        start = _warm_up(Path(folder) / "start", overrides)
        module = load(ModelConfig(path=str(start)), dtype=torch.float32, device=torch.device("cpu"), seed=0).module
        scaling, quantized = find_scaling(module), [layer.name for layer in quantized_layers(module)]
        matrices = Matrices(
            [name for name in quantized if name in scaling.matrices],
            [name for name in quantized if name not in scaling.matrices],
        )
        console.print(_at_once({name: p.detach() for name, p in module.named_parameters()}, scaling, matrices, scale))
        arms = []
        for name in ARMS:
            status.update(f"{steps} steps of RL: {name}")
            run = _run(Path(folder) / name, _tables(start, name, scale, steps, precision), in_rl)
            arms.append(_measure(name, run, matrices, format))
    console.print(_over_steps(arms, scale, steps, precision))
    differ = _changed(arms[1].last, arms[2].last, matrices.scaled, format)
    console.print(f"weights and rates end with {1 - differ:.2%} of these codes equal", highlight=False)


def _warm_up(root: Path, overrides: Sequence[str]) -> Path:
    tables = read_tables(recipe_files.find(RECIPE))
    changes = {"train": tables["train"] | {"steps": 0}, "warmup": tables["warmup"] | {"control": False}}
    checkpoint = _run(root, tables | changes, overrides).result
    assert checkpoint is not None
    return checkpoint


def _tables(start: Path, arm: str, scale: float, steps: int, precision: str) -> dict[str, Any]:
    """The recipe of one arm."""
    tables = read_tables(recipe_files.find(RECIPE))
    del tables["warmup"]
    return tables | {
        "model": {"path": str(start)},
        "train": tables["train"] | {"steps": steps},
        "rollout": tables["rollout"] | {"precision": precision},
        "learner": LEARNER | ({} if arm == "none" else {"update_scale": scale, "update_scale_by": arm}),
        "eval": tables["eval"] | {"every": 0},
        "checkpoint": KEEP_ALL,
    }


def _run(root: Path, tables: dict[str, Any], overrides: Sequence[str]) -> RunFolder:
    recipe, _ = resolve(Recipe, tables, ["device=cpu", *overrides], RECIPE)
    with redirect_stdout(io.StringIO()):
        train(recipe, root, plain=True)
    return RunFolder.open(root)


def _measure(name: str, run: RunFolder, matrices: Matrices, format: Format) -> Arm:
    rows = list(run.read_metrics())
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    versions = [_masters(folder) for folder in sorted(run.checkpoints.glob("step-*"))]
    return Arm(
        name=name,
        scaled=mean(_changed(a, b, matrices.scaled, format) for a, b in pairwise(versions)),
        others=mean(_changed(a, b, matrices.others, format) for a, b in pairwise(versions)),
        reward=mean(rewards[len(rewards) // 2 :]),
        accuracy=[math.nan, *(row.get("eval/accuracy", math.nan) for row in rows if "eval/length" in row)][-1],
        last={name: weight.clone() for name, weight in versions[-1].items()},
    )


def _masters(checkpoint: Path) -> Weights:
    found = read_masters(checkpoint)
    assert found is not None, "a run's checkpoints have them"
    return found.weights


def _changed(a: Weights, b: Weights, names: Sequence[str], format: Format) -> float:
    """Share of codes that differ, over all weights named."""
    shares = [format.quantize(a[name]).changed(format.quantize(b[name])).item() * a[name].numel() for name in names]
    return sum(shares) / sum(a[name].numel() for name in names)


def _at_once(weights: Weights, scaling: Scaling, matrices: Matrices, scale: float) -> Table:
    scaled = {name: weight.clone() for name, weight in weights.items()}
    scaling.apply(scaled, scale)
    table = Table(title=f"codes that change when {len(matrices.scaled)} matrices are divided by {scale:g}")
    for column in ("format", "share of codes"):
        table.add_column(column)
    for name in choices(FORMATS):
        share = _changed(weights, scaled, matrices.scaled, load_class(FORMATS, name)())
        table.add_row(name, f"{share:.4%}")
    return table


def _over_steps(arms: Sequence[Arm], scale: float, steps: int, precision: str) -> Table:
    table = Table(title=f"{steps} steps of RL sampled in {precision}, scale {scale:g}")
    for column in ("scale", "codes changed a step", "others", "reward, 2nd half", "held-out accuracy"):
        table.add_column(column)
    for arm in arms:
        table.add_row(arm.name, f"{arm.scaled:.3%}", f"{arm.others:.3%}", f"{arm.reward:.3f}", f"{arm.accuracy:.1%}")
    return table
