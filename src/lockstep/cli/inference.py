"""`lockstep eval` and `lockstep generate`: the engine without a learner."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.assembly.export import encode_masters
from lockstep.assembly.governed import as_governed, held
from lockstep.assembly.recipe import Recipe
from lockstep.assembly.roles import Sampling, load_model
from lockstep.cli import recipe_files
from lockstep.config import ConfigError, load, resolve
from lockstep.config.loading import validate
from lockstep.config.paths import given_path
from lockstep.controller.checkpoints import read_progress
from lockstep.data.chat import render_prompt, response_text
from lockstep.learner.checkpoint import sampled_in
from lockstep.models.loading import read_config
from lockstep.quant.ladder import HIGH
from lockstep.report.run_folder import RunFolder
from lockstep.types import Message, Request, Sample, Trajectory

# Of a recipe: tables and keys that only training reads, but for LOADED, and those that only its samples are drawn by.
TRAINED = frozenset(
    {"name", "warmup", "algorithm", "train", "learner", "governor", "checkpoint", "record"}
    | {"rollout.sleep", "rollout.update", "rollout.exact", "eval.every"}
)
LOADED = "learner.dtype"
DRAWN = frozenset({"rollout.temperature", "rollout.top_k", "rollout.top_p", "rollout.min_p"})


def evaluate(checkpoint: str, overrides: Sequence[str], *, recipe: str | None, show: int, console: Console) -> None:
    _refuse_unread(overrides)
    path, chosen = checkpoint_and_recipe(checkpoint, overrides, recipe, console)
    if not chosen.eval.samples:
        raise ConfigError("eval.samples is 0: there is nothing to evaluate")
    shown: list[tuple[Sample, Trajectory]] = []

    def keep(sample: Sample, answer: Trajectory) -> None:
        if len(shown) < show:
            shown.append((sample, answer))

    async def run() -> dict[str, float]:
        roles = Sampling(chosen, load_model(chosen, path))
        if low_bit := roles.low_bit:
            low_bit.take(encode_masters(Path(path), roles.loaded, low_bit.format, low_bit.layers))
        try:
            evaluator = roles.evaluator(lambda text: console.print(Text(text, style="yellow")))
            assert evaluator is not None
            with console.status(f"evaluating {len(evaluator.samples)} held-out problems"):
                return await evaluator.run(keep)
        finally:
            await roles.close()

    metrics = asyncio.run(run())
    for sample, answer in shown:
        console.print(_shown(sample, answer))
    which = f"{checkpoint}, {Path(path).name}," if is_run(checkpoint) else checkpoint
    console.print(Text(f"\n{which} on {chosen.task.name}", style="bold"), soft_wrap=True)
    console.print(_figures(metrics))


def _refuse_unread(overrides: Sequence[str]) -> None:
    """An override without an effect would be taken for what made the figures."""
    for key in (text.partition("=")[0] for text in overrides):
        if key in DRAWN:
            raise ConfigError(f"eval does not read {key}: its answers are greedy, and eval.k more at eval.temperature")
        if key != LOADED and {key, key.partition(".")[0]} & TRAINED:
            raise ConfigError(f"eval does not read {key}: it is of training alone")


def _figures(metrics: Mapping[str, float]) -> Table:
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4g}")
    return table


def _shown(sample: Sample, answer: Trajectory) -> Text:
    """Text and never markup: a model may well answer `[/b]`."""
    why = f"{answer.verdict.value}: {'; '.join(answer.verdict.reasons)}"
    return Text.assemble("\n", (sample.messages[-1].content, "bold"), f"\n{answer.text}\n", (why, "dim"))


def generate(
    checkpoint: str,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    temperature: float,
    num: int,
    seed: int,
    console: Console,
) -> None:
    path = resolve_checkpoint(checkpoint)
    drawn = {"max_tokens": max_tokens, "temperature": temperature}
    tables = ask_only(path, checkpoint)
    chosen = validate(Recipe, tables | {"rollout": tables["rollout"] | drawn}, "command line")

    async def run() -> None:
        loaded = load_model(chosen)
        roles = Sampling(chosen, loaded)
        try:
            requests = [
                Request(
                    uid=f"{number}/{n}",
                    tokens=tuple(render_prompt(loaded.tokenizer, [Message("user", prompt)])),
                    params=replace(chosen.rollout.params(), seed=seed + n),
                )
                for number, prompt in enumerate(prompts)
                for n in range(num)
            ]
            async for done in roles.engine.generate(requests):
                prompt = prompts[int(done.uid.split("/")[0])]
                text = response_text(loaded.tokenizer, done.tokens)
                console.print(Text.assemble((prompt, "bold"), f" {text} ", (f"({done.stop_reason})", "dim")))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        finally:
            await roles.close()

    asyncio.run(run())


def checkpoint_and_recipe(
    checkpoint: str, overrides: Sequence[str], recipe: str | None, console: Console
) -> tuple[str, Recipe]:
    """Of a run, as it sampled at that checkpoint, or of a checkpoint with the recipe it is to be used with.

    Tells which checkpoint of the run it is where the governor had changed something by then, or where a resume has
    changed the precision since.
    """
    keys = {text: text.partition("=")[0] for text in overrides}
    if models := [text for text, key in keys.items() if key.split(".")[0] == "model" and key != "model.float32_logits"]:
        raise ConfigError(f"{models[0]} has no effect: the model is the one of {checkpoint}")
    path = resolve_checkpoint(checkpoint)
    # No log-prob is held against a learner's here, and a CPU would refuse it.
    overrides = ["rollout.exact=false", *overrides]
    if recipe is not None:
        return path, load(Recipe, recipe_files.find(recipe), overrides)
    if (root := run_of(checkpoint)) is None:
        raise ConfigError(f"{checkpoint} is neither a run nor in one: name the task with --recipe")
    folder = RunFolder.open(root)
    begun = validate(Recipe, folder.read_config(), str(folder.config))
    progress = read_progress(Path(path))
    if changed := held(begun, progress):
        console.print(Text(f"{Path(path).name}, {changed}", style="dim"), soft_wrap=True)
    tables = as_governed(begun, progress).model_dump(mode="json")
    with suppress(FileNotFoundError):  # a checkpoint without the learner's state: as the run's recipe says
        if (precision := sampled_in(Path(path))) != tables["rollout"]["precision"]:
            console.print(Text(f"{Path(path).name}, sampled from in {precision or HIGH}", style="dim"), soft_wrap=True)
            tables["rollout"]["precision"] = precision
    return path, resolve(Recipe, tables, overrides, str(folder.config))[0]


def is_run(checkpoint: str) -> bool:
    with given_path(f"no model at {checkpoint!r}"):
        return (Path(checkpoint) / "metrics.jsonl").is_file()


def run_of(checkpoint: str) -> Path | None:
    """The run that it is, or that it is a checkpoint of."""
    if is_run(checkpoint):
        return Path(checkpoint)
    above = Path(checkpoint).resolve().parent
    return above.parent if above.name == "checkpoints" and is_run(str(above.parent)) else None


def resolve_checkpoint(checkpoint: str) -> str:
    """A run stands for its best checkpoint, or the newest if none was evaluated; anything else for itself.

    What is no checkpoint either is refused before anything else is asked for.
    """
    if not is_run(checkpoint):
        read_config(checkpoint)
        return checkpoint
    found = RunFolder.open(Path(checkpoint)).result
    if found is None:
        raise ConfigError(f"the run {checkpoint} has no checkpoint yet")
    return str(found.resolve())


def ask_only(path: str, checkpoint: str) -> dict[str, Any]:
    """A recipe that only asks, in high precision: task and algorithm are never used. A run's model computes, and ends
    its answers, as in the run."""
    tables: dict[str, Any] = {"task": "arithmetic", "algorithm": {"surrogate": "grpo"}, "train": {"steps": 0}}
    root = run_of(checkpoint)
    begun = RunFolder.open(root).read_config() if root is not None else {}
    float32_logits = begun.get("model", {}).get("float32_logits", False)
    dtype = begun.get("learner", {}).get("dtype", "auto")
    model = {"path": path, "float32_logits": float32_logits}
    rollout = {"stop": begun.get("rollout", {}).get("stop", ())}
    return tables | {"model": model, "learner": {"dtype": dtype}, "rollout": rollout}
