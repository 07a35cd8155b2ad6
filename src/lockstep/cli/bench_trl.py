"""`lockstep bench trl`: the same GRPO run under TRL's GRPOTrainer and under Lockstep, in turns.

Everything that decides how much work a step is, is the same on both sides: checkpoint, prompts in their order, answers
per prompt, lengths of answers, reward, loss, optimiser, precision, threads. The checkpoint decides the lengths: its end
token has the same chance after every token, or an id outside the vocabulary, and then all answers have full length.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from lockstep.assembly.governed import reach
from lockstep.assembly.recipe import Recipe
from lockstep.assembly.roles import Training, load_model
from lockstep.cli.benchmarks import Measured, Turn, processor, take_turns
from lockstep.config import ConfigError
from lockstep.config.loading import validate
from lockstep.controller.checkpoints import Checkpoints, Progress
from lockstep.controller.governor import GovernorConfig
from lockstep.controller.loop import Controller, Roles
from lockstep.data.order import PromptOrder
from lockstep.models.tiny import TinyModel, byte_tokenizer, tiny_model
from lockstep.protocols import Recorder
from lockstep.report.recorder import Recorders, RunRecorder
from lockstep.report.run_folder import RunFolder
from lockstep.tasks.arithmetic import Arithmetic
from lockstep.types import Group, Sample, Verdict

SEED = 0
LEARNING_RATE = 1e-6  # so small that lengths stay: at 1e-4 they double within five steps
TEMPERATURE = 1.0
NEVER = "<|never|>"  # ends an answer, and cannot be sampled
OURS, THEIRS, THEIRS_CONTINUOUS = "Lockstep", "TRL", "TRL, continuous batching"


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    prompts: int  # per step
    group_size: int
    prompt_tokens: int
    max_tokens: int
    mean_tokens: int | None = None  # of answers that end by themselves; None: all have max_tokens
    hidden: int = 128
    layers: int = 4

    @property
    def samples(self) -> int:
        return self.prompts * self.group_size

    def __str__(self) -> str:
        sampled = f"{self.max_tokens}" if self.mean_tokens is None else f"~{self.mean_tokens} (≤ {self.max_tokens})"
        lengths = f"{self.prompt_tokens} prompt and {sampled} sampled tokens each"
        return f"{self.name}: {self.prompts} prompts × {self.group_size} answers, {lengths}"


SETTINGS = {
    "mixed": Setting("mixed", prompts=16, group_size=8, prompt_tokens=32, max_tokens=128, mean_tokens=30),
    "short": Setting("short", prompts=16, group_size=8, prompt_tokens=32, max_tokens=32),
    "long": Setting("long", prompts=8, group_size=8, prompt_tokens=32, max_tokens=128),
    "prompt": Setting("prompt", prompts=8, group_size=8, prompt_tokens=256, max_tokens=32),
}


@dataclass(frozen=True, kw_only=True)
class Digits:
    """Sums as prompts, all of one length, and a reward any model gets some of: the share of digits in its answer."""

    fast: ClassVar[bool] = True

    prompt_tokens: int = 32

    @cached_property
    def _sums(self) -> Arithmetic:
        """`7+5+9=`: a digit and a sign per term."""
        return Arithmetic(min_terms=self.prompt_tokens // 2, max_terms=self.prompt_tokens // 2)

    def samples(self, split: str) -> Sequence[Sample]:
        return self._sums.samples(split)

    def demonstrations(self) -> Sequence[Sample]:
        return ()

    def reward(self, sample: Sample, answer: str) -> Verdict:
        return Verdict(value=share_of_digits(answer))


def share_of_digits(answer: str) -> float:
    return sum(map(str.isdigit, answer)) / max(1, len(answer))


def compare(
    names: Sequence[str],
    *,
    steps: int,
    warmup: int,
    threads: int | None,
    continuous: bool,
    out: Path | None,
    console: Console,
) -> None:
    if find_spec("trl") is None:
        raise ConfigError('TRL is not installed: pip install "lockstep-rl[bench]"')
    if unknown := set(names) - set(SETTINGS):
        raise ConfigError(f"unknown setting {min(unknown)!r}; choices: {', '.join(SETTINGS)}")
    threads = threads or os.cpu_count() or 1
    # Threads that spin while they wait for each other slow TRL far more than Lockstep when others use the cores too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    quiet()
    console.print(f"{conditions(threads)}; {steps} steps each, in turns, after {warmup} to warm up", highlight=False)
    results: dict[Setting, list[Measured]] = {}
    for setting in (SETTINGS[name] for name in names or SETTINGS):
        results[setting] = run(setting, steps, warmup, threads, continuous, console)
        console.print(table(setting, results[setting]))
    if out is not None:
        out.write_text(json.dumps(summary(results, threads), indent=2) + "\n")


def run(setting: Setting, steps: int, warmup: int, threads: int, continuous: bool, console: Console) -> list[Measured]:
    """All sides of one setting, in turns."""
    rounds = warmup + steps
    with tempfile.TemporaryDirectory() as temporary, console.status(f"{setting.name}: loading") as status:
        folder = Path(temporary)
        save_model(setting, folder / "model")

        def show(number: int, measured: Sequence[Measured]) -> None:
            speeds = " · ".join(f"{m.name} {m.samples_per_s:.1f} samples/s" for m in measured if m.steps)
            status.update(f"{setting.name}: step {number} of {rounds} · {speeds or 'warming up'}")

        common = (setting, folder, rounds, threads)
        sides: list[tuple[str, Callable[..., None], tuple[object, ...]]] = [
            (THEIRS, trl_side, (*common, False)),
            (OURS, lockstep_side, common),
        ]
        if continuous:
            sides.insert(1, (THEIRS_CONTINUOUS, trl_side, (*common, True)))
        return take_turns(sides, steps=steps, warmup=warmup, on_step=show)


def save_model(setting: Setting, folder: Path) -> None:
    """One checkpoint for both sides, which decides how long answers get."""
    model = tiny_model(TinyModel(hidden=setting.hidden, layers=setting.layers), seed=SEED)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None  # a prompt is its text, and only the end token ends an answer
    if setting.mean_tokens is None:
        tokenizer.add_special_tokens({"eos_token": NEVER})
        assert tokenizer.eos_token_id == model.config.vocab_size
    else:
        end_by_chance(model, model.config.eos_token_id, 1 / setting.mean_tokens)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id  # type: ignore[union-attr]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def end_by_chance(model: PreTrainedModel, end: int, chance: float) -> None:
    """Gives the end token about this chance after any token, without training: lengths are then geometric.

    A constant added to all embeddings lives on in every hidden state. The head, whose rows they are too, turns it into
    one shift of all logits, which changes no probability. The end token gets this constant alone and a little more of
    it: a logit that is nearly the same everywhere.
    """
    rows = model.get_input_embeddings().get_parameter("weight")
    rows += 1.0  # large beside random rows of length 1: it must outlast what the layers add
    rows[end] = 1.0
    tokens = torch.randint(end, (16, 160), generator=torch.Generator().manual_seed(SEED))
    hidden = model.base_model(tokens).last_hidden_state.flatten(0, 1)
    logits = hidden @ rows.T
    others = (logits - logits[:, [end]])[:, torch.arange(len(rows)) != end].logsumexp(-1)
    wanted = others.mean() + math.log(chance / (1 - chance))
    rows[end] += wanted / hidden.sum(-1).mean()


def lockstep_side(turn: Turn, setting: Setting, folder: Path, steps: int, threads: int) -> None:
    """A recipe's roles under the controller, recording into a run folder as `lockstep train` does."""
    quiet()
    torch.set_num_threads(threads)
    recipe = validate(Recipe, recipe_tables(setting, folder / "model", steps), "bench trl")
    run_folder = RunFolder.create(folder / "run")
    with RunRecorder(run_folder, recipe.record) as recorder:
        asyncio.run(train(recipe, run_folder, recorder, turn))


def recipe_tables(setting: Setting, model: Path, steps: int) -> dict[str, Any]:
    return {
        "seed": SEED,
        "device": "cpu",
        "model": {"path": str(model)},
        "task": {"name": f"{__name__}:{Digits.__name__}", "prompt_tokens": setting.prompt_tokens},
        "algorithm": {"surrogate": "grpo", "truncated": "keep"},
        "train": {"steps": steps, "prompts": setting.prompts, "group_size": setting.group_size},
        "rollout": {"max_tokens": setting.max_tokens, "temperature": TEMPERATURE},
        "learner": {"learning_rate": LEARNING_RATE},
        "eval": {"samples": 0},
    }


async def train(recipe: Recipe, run_folder: RunFolder, recorder: Recorder, turn: Turn) -> None:
    """All steps of a recipe without evaluation; `turn` is told of each and may wait between them."""
    recorders = Recorders([recorder, TurnRecorder(turn)])  # in this order: recording is part of the step
    training = Training(recipe, load_model(recipe), recorders)
    await training.learner.publish(0)
    await training.engine.update_weights(0)
    roles = Roles(
        engine=training.engine,
        rollout=training.rollout,
        learner=training.learner,
        bus=training.bus,
        recorder=recorders,
        sample=training.prompts,
        evaluate=None,
        checkpoints=Checkpoints(run_folder.root / "checkpoints", recipe.checkpoint.keep),
    )
    start = Progress(step=0, version=0, next_index=0, unfinished=[])
    controller = Controller(
        roles,
        recipe.train,
        recipe.checkpoint,
        progress=start,
        eval_every=0,
        dynamic_sampling=False,
        governor=GovernorConfig(mode="off"),
        reach=reach(recipe),
    )
    turn.begin()
    try:
        await controller.run()
    finally:
        await training.close()


class TurnRecorder:
    """Counts what is learned from. Logging a step ends it; nothing else runs then, so waiting there stops the run."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if "time/total" in metrics:  # a checkpoint is logged too, and ends no step
            self._turn.end_step()

    def samples(self, step: int, group: Group) -> None:
        self._turn.count(len(group.trajectories), sum(t.num_sampled for t in group.trajectories))

    def event(self, step: int, kind: str, text: str) -> None: ...


def trl_side(turn: Turn, setting: Setting, folder: Path, steps: int, threads: int, continuous: bool) -> None:
    """TRL's trainer on the same prompts in the same order."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    class Turns(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **extra: Any) -> None:
            turn.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **extra: Any) -> None:
            turn.end_step()

    def reward(completions: list[str], completion_ids: list[list[int]], **extra: Any) -> list[float | None]:
        turn.count(len(completions), sum(map(len, completion_ids)))
        return [share_of_digits(answer) for answer in completions]

    quiet()
    torch.set_num_threads(threads)
    model = folder / "model"
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa"),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": prompts(setting, steps)}),
        args=GRPOConfig(output_dir=str(folder / "trl"), **trl_options(setting, steps, continuous)),
        callbacks=[Turns()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def prompts(setting: Setting, steps: int) -> list[str]:
    """What Lockstep's run asks, in its order."""
    samples = Digits(prompt_tokens=setting.prompt_tokens).samples("train")
    order = PromptOrder(len(samples), SEED)
    return [samples[order[index]].messages[0].content for index in range(setting.prompts * steps)]


def trl_options(setting: Setting, steps: int, continuous: bool) -> dict[str, Any]:
    """The least work TRL can do for this: a batch is sampled and learned from in one piece, nothing else is done."""
    return {
        "max_steps": steps,
        "per_device_train_batch_size": setting.samples,
        "gradient_accumulation_steps": 1,
        "num_generations": setting.group_size,
        "max_completion_length": setting.max_tokens,
        "temperature": TEMPERATURE,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "loss_type": "grpo",
        "beta": 0.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_transformers_continuous_batching": continuous,
        "shuffle_dataset": False,
        "seed": SEED,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def table(setting: Setting, measured: Sequence[Measured]) -> Table:
    found = Table("", title=str(setting))
    for column in (
        "samples/s",
        "sampled tokens/s",
        "s per step",
        "CPU s per step",
        "mean length",
        "Lockstep's speed-up",
    ):
        found.add_column(column, justify="right")
    ours = next(m for m in measured if m.name == OURS)
    for side in measured:
        found.add_row(
            side.name,
            f"{side.samples_per_s:.1f}",
            f"{side.tokens_per_s:.0f}",
            f"{side.seconds:.2f}",
            f"{side.cpu_seconds:.2f}",
            f"{side.length:.1f}",
            "" if side is ours else f"{speed_up(ours, side):.2f}×",
        )
    return found


def speed_up(ours: Measured, other: Measured) -> float:
    """By samples per second."""
    return ours.samples_per_s / other.samples_per_s


def summary(results: Mapping[Setting, Sequence[Measured]], threads: int) -> dict[str, Any]:
    return {
        "conditions": conditions(threads),
        "settings": [
            {**asdict(setting), "sides": {side.name: side.summary() for side in measured}}
            for setting, measured in results.items()
        ],
    }


def conditions(threads: int) -> str:
    """Machine and versions, in one line."""
    packages = ("lockstep-rl", "trl", "transformers", "torch")
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in packages)
    return f"{processor()}, {os.cpu_count()} cores, {threads} threads per side, float32; {versions}"


def quiet() -> None:
    """Bars of libraries, and transformers' warning where the end token cannot be sampled: that is the point of it."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
