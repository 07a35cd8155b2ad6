"""A run from beginning to end: warm-up, RL, control, report. What `lockstep train` calls, and what a script may call.

progress = train(load(Recipe, Path("my.toml")), Path("runs/mine"))
"""

from __future__ import annotations

import asyncio
import gc
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.assembly.devices import choose_device
from lockstep.assembly.governed import as_governed, held, in_words, reach
from lockstep.assembly.outcome import Governed, Interrupted
from lockstep.assembly.recipe import Recipe
from lockstep.assembly.roles import Training, learner_core, load_model, low_bit_weights, routers_of
from lockstep.assembly.signals import ignore_signals, stopped_by_signals
from lockstep.assembly.unlogged import never_logged
from lockstep.assembly.warmup import Supervised
from lockstep.config import ConfigError
from lockstep.config.loading import validate
from lockstep.controller.audit import Audit
from lockstep.controller.checkpoints import Checkpoints, Progress, force_to_disk
from lockstep.controller.loop import Controller, Roles
from lockstep.controller.steward import Halted
from lockstep.data.supervised import Demonstrations
from lockstep.learner.ranks import Ranks, join, leave, serve
from lockstep.models.loading import CheckpointError, Loaded, load_tokenizer, read_config
from lockstep.report.environment import environment
from lockstep.report.live import LiveView
from lockstep.report.page import write_report
from lockstep.report.recorder import Recorders, RunRecorder
from lockstep.report.run_folder import RunFolder
from lockstep.rollout.evaluate import Evaluator
from lockstep.types import Sample

START = Progress(step=0, version=0, next_index=0, unfinished=[])


@dataclass(frozen=True, slots=True)
class Stage:
    """What one set of roles did."""

    progress: Progress
    goes_on: bool  # with other roles


def train(recipe: Recipe, root: Path, *, resume: bool = False, plain: bool = False) -> Progress | None:
    """Trains in `root`, a new run folder or, with `resume`, an old one. Interrupted if a signal ended it early.

    Started by torchrun, rank 0 does all this; the other ranks follow its learner and return None.
    """
    ranks = join(choose_device(recipe.device, exact=recipe.rollout.exact))
    if ranks.world > 1 and recipe.warmup and recipe.warmup.control:
        raise ConfigError("warmup.control = true needs a run on one rank")
    try:
        return _lead(recipe, root, ranks, resume, plain) if ranks.rank == 0 else _follow(recipe, ranks)
    finally:
        leave()


def _lead(recipe: Recipe, root: Path, ranks: Ranks, resume: bool, plain: bool) -> Progress:
    _check_reference(recipe)
    folder = RunFolder.open(root) if resume else RunFolder.create(root)
    with folder.locked():
        return _lead_in(folder, recipe, ranks, resume, plain)


def _check_reference(recipe: Recipe) -> None:
    """A wrong path is told at once, not when the warm-up is over."""
    if recipe.algorithm.kl and recipe.algorithm.kl.reference:
        read_config(recipe.algorithm.kl.reference)
        load_tokenizer(recipe.algorithm.kl.reference)


def _lead_in(folder: RunFolder, recipe: Recipe, ranks: Ranks, resume: bool, plain: bool) -> Progress:
    checkpoints = Checkpoints(folder.checkpoints, recipe.checkpoint.keep)
    found = checkpoints.latest() if resume else None
    if found:
        _refuse_another_run(recipe, folder)
        if found[1].step > recipe.train.steps:
            raise ConfigError(f"{folder.root} is at step {found[1].step} already; train.steps is {recipe.train.steps}")
    before = folder.read_config() if resume else None
    if resume and not found and folder.ever_saved:
        raise ConfigError(f"{folder.checkpoints} has no checkpoint any more: put one back, or start a new run")
    if resume:
        folder.rewind(found[1].step if found else -1)
    if found is None:
        folder.write_config(recipe.model_dump(mode="json"))
    with _kept_if_begun(folder, before), _governed(folder):
        with RunRecorder(folder, recipe.record) as recorder, LiveView(recipe.name, plain=plain) as view:
            run = _Run(recipe, folder, checkpoints, ranks, recorder, view)
            progress = asyncio.run(run.main(found))
        write_report(folder)
    if progress.step < recipe.train.steps:
        raise Interrupted(folder.root, progress.step, recipe.train.steps)
    return progress


def _refuse_another_run(recipe: Recipe, folder: RunFolder) -> None:
    """Model and seed are what a run is: with others its checkpoint and its order of prompts would not fit."""
    before = validate(Recipe, folder.read_config(), str(folder.config))
    for key in ("model", "seed"):
        if getattr(before, key) != getattr(recipe, key):
            raise ConfigError(f"{folder.root} was begun with another `{key}`: start a new run, or leave it as it was")


@contextmanager
def _kept_if_begun(folder: RunFolder, before: Mapping[str, Any] | None) -> Iterator[None]:
    """A run that failed still gets its report. One refused before its first checkpoint leaves nothing if it is new, or
    the config from `before`."""
    try:
        yield
    except BaseException as error:
        if folder.checkpoints.is_dir():
            with suppress(OSError, ConfigError):  # the disk may be what failed, or what the run has logged
                write_report(folder)
        elif isinstance(error, ConfigError) and before is None:
            folder.remove()
        elif isinstance(error, ConfigError) and before is not None:
            folder.write_config(before)
        raise


@contextmanager
def _governed(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except Halted as halted:
        raise Governed(folder.root, str(halted)) from None


def _follow(recipe: Recipe, ranks: Ranks) -> None:
    """Signals are for rank 0, which tells the others where the run stands before roles are built; None at its end."""
    ignore_signals()
    while (progress := ranks.from_front()) is not None:
        _serve(as_governed(recipe, progress), ranks)
        gc.collect()


def _serve(recipe: Recipe, ranks: Ranks) -> None:
    loaded = load_model(recipe)
    serve(learner_core(recipe, loaded, ranks, low_bit_weights(recipe, loaded), routers_of(recipe, loaded)))


def _load(recipe: Recipe, checkpoint: Path | None) -> Loaded:
    try:
        return load_model(recipe, checkpoint)
    except CheckpointError as error:
        if checkpoint is None:
            raise
        raise ConfigError(f"{error}; remove that checkpoint to go on from the one before") from error


class _Run:
    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        checkpoints: Checkpoints,
        ranks: Ranks,
        recorder: RunRecorder,
        view: LiveView,
    ) -> None:
        self.recipe = recipe
        self.folder = folder
        self.checkpoints = checkpoints
        self.ranks = ranks
        self.recorder = Recorders([recorder, view])
        self.view = view
        self.warmup_folder = folder.root / "warmup"
        self.reference_folder = folder.root / "reference"

    async def main(self, found: tuple[Path, Progress] | None) -> Progress:
        """consumes: the last checkpoint, if any · waits for: the loop · unblocked by: its last step, or a signal"""
        self.ranks.from_front(found[1] if found else START)
        stage = await self._stage(found, "resumed")
        while stage.goes_on:
            gc.collect()  # roles refer to each other; their memory is needed for the next ones
            stage = await self._stage(self.checkpoints.latest(), "precision")
        progress = stage.progress
        if self.recipe.warmup and self.recipe.warmup.control and progress.step == self.recipe.train.steps:
            await self._control(progress)
        return progress

    async def _stage(self, found: tuple[Path, Progress] | None, why: str) -> Stage:
        """From a checkpoint, or the beginning, to the run's end, or to where sampling moves to another precision.

        Then both sides are built anew from the checkpoint just written, as by a resume: nothing is carried over that a
        checkpoint does not hold.
        """
        self.view.phase("loading", 0)
        checkpoint, progress = found or (None, START)
        recipe = as_governed(self.recipe, progress)
        loaded = _load(recipe, checkpoint)
        self.folder.write_environment(environment(loaded.module.device))
        roles = Training(recipe, loaded, self.recorder, version=progress.version)
        goes_on: Progress | None = None
        try:
            roles.check_reference()
            sample = roles.prompts  # before anything is written: the task may lack what it is made of
            evaluator = roles.evaluator(lambda text: self.recorder.event(progress.step, "skipped", text))
            if why == "resumed":
                self._tell_never_logged(roles, progress.step)
                self._tell_if_answers_end_early(roles, progress.step)
                self._tell_if_there_are_no_turns(roles, progress.step)
            async with _asleep(roles):
                if checkpoint is not None:
                    await self._go_on(roles, checkpoint, progress, why)
                else:
                    await self._begin(roles)
            stage = await self._learn(roles, progress, sample, evaluator)
            goes_on = stage.progress if stage.goes_on else None
            return stage
        finally:
            await roles.close()
            self.ranks.from_front(goes_on)

    async def _go_on(self, roles: Training, checkpoint: Path, progress: Progress, why: str) -> None:
        await roles.learner.load(checkpoint)
        await self._load_reference(roles)
        self.folder.write_config(self.recipe.model_dump(mode="json"))  # only keys that fit the run's state
        precision = in_words(roles.recipe.rollout.precision)
        text = f"goes on from {checkpoint.name}; sampling in precision {precision}"
        if kept := held(self.recipe, progress):
            text += f"; {kept}"
        self.recorder.event(progress.step, why, text)

    def _tell_never_logged(self, roles: Training, step: int) -> None:
        missing = never_logged(self.recipe, has_routes=roles.core.updater.routers is not None)
        if missing:
            named = "; ".join(f"{name} ({why})" for name, why in missing.items())
            self.recorder.event(step, "rules", f"rules of the governor wait for what this run never logs: {named}")

    def _tell_if_answers_end_early(self, roles: Training, step: int) -> None:
        if (most := self.recipe.rollout.max_tokens) >= (context := roles.loaded.context):
            text = f"rollout.max_tokens = {most}, but prompt and answer together end at the model's context, {context}"
            self.recorder.event(step, "context", text)

    def _tell_if_there_are_no_turns(self, roles: Training, step: int) -> None:
        if not roles.loaded.tokenizer.chat_template:
            text = "the tokenizer has no chat template: a prompt is its text alone, which a chat model does not know"
            self.recorder.event(step, "template", text)

    async def _begin(self, roles: Training) -> None:
        if self.recipe.warmup:
            await self._warm_up(roles)
        if self.recipe.algorithm.kl and not self.recipe.algorithm.kl.reference:
            await self._keep_reference(roles)
        await self._load_reference(roles)

    async def _warm_up(self, roles: Training) -> None:
        assert self.recipe.warmup is not None
        self.view.phase("warm-up", self.recipe.warmup.steps)
        await self._supervised(roles).run(self.recipe.warmup.steps, self.recorder)
        if self.recipe.warmup.control:
            await self._keep_for_control(roles)
        await roles.learner.forget()

    async def _keep_for_control(self, roles: Training) -> None:
        """Where the control will go on from: weights and optimiser as the warm-up left them."""
        shutil.rmtree(self.warmup_folder, ignore_errors=True)  # of a run that was killed before its first checkpoint
        self.warmup_folder.mkdir()
        await roles.learner.save(self.warmup_folder)

    async def _keep_reference(self, roles: Training) -> None:
        """On disk before the first checkpoint is, so that whoever finds a checkpoint finds the reference whole."""
        shutil.rmtree(self.reference_folder, ignore_errors=True)  # of a run that was killed before its first checkpoint
        self.reference_folder.mkdir()
        await roles.learner.save_model(self.reference_folder)
        force_to_disk([*self.reference_folder.rglob("*"), self.reference_folder])

    async def _load_reference(self, roles: Training) -> None:
        """A run's own reference is written once and read back by every start alike, the first one too."""
        kl = self.recipe.algorithm.kl
        if kl is None:
            return
        if not kl.reference and not self.reference_folder.is_dir():
            raise ConfigError(
                f"{self.folder.root} was begun without `algorithm.kl`, so the model it began with is not kept: "
                "give a checkpoint as algorithm.kl.reference"
            )
        await roles.learner.load_reference(kl.reference or str(self.reference_folder))

    def _supervised(self, roles: Training) -> Supervised:
        assert self.recipe.warmup is not None
        demonstrations = Demonstrations(
            samples=roles.task.demonstrations(),
            tokenizer=roles.loaded.tokenizer,
            batch_size=self.recipe.warmup.batch_size,
            seed=self.recipe.seed,
            max_tokens=roles.loaded.context,
        )
        return Supervised(roles.learner, demonstrations, self.recipe.warmup)

    async def _learn(
        self, roles: Training, progress: Progress, sample: Callable[[int], Sample], evaluator: Evaluator | None
    ) -> Stage:
        await roles.learner.publish(progress.version)
        await roles.engine.update_weights(progress.version)
        controller = Controller(
            Roles(
                engine=roles.engine,
                rollout=roles.rollout,
                learner=roles.learner,
                bus=roles.bus,
                recorder=self.recorder,
                sample=sample,
                evaluate=evaluator.run if evaluator else None,
                checkpoints=self.checkpoints,
                audit=Audit(roles.engine, roles.learner, aligned=self.recipe.learner.alignment == "aligned"),
            ),
            self.recipe.train,
            self.recipe.checkpoint,
            progress=progress,
            eval_every=self.recipe.eval.every,
            dynamic_sampling=self.recipe.algorithm.replaces_groups,
            governor=self.recipe.governor,
            reach=reach(self.recipe),
            sleeps=self.recipe.rollout.sleep,
        )
        self.view.phase("RL", self.recipe.train.steps, done=progress.step)
        with stopped_by_signals(controller.stop):
            progress = await controller.run()
        return Stage(progress, goes_on=controller.to_be_rebuilt)

    async def _control(self, progress: Progress) -> None:
        """Supervised learning alone, from the end of the warm-up, for as long as RL took. Its weights are not kept."""
        assert self.recipe.warmup is not None
        recipe = as_governed(self.recipe, progress)  # evaluated as the run was in the end
        roles = Training(recipe, load_model(recipe, self.warmup_folder), self.recorder)
        try:
            await roles.learner.load(self.warmup_folder)
            supervised = self._supervised(roles)
            supervised.skip(self.recipe.warmup.steps)
            about = "supervised learning alone for as long as RL took"
            self.view.phase("control", round(progress.train_seconds), unit="s", about=about)
            async with _asleep(roles):
                await supervised.run_for(progress.train_seconds, lambda gone: self.view.reached(round(gone)))
            self.recorder.log(progress.step, await self._evaluate_control(roles))
        finally:
            await roles.close()

    async def _evaluate_control(self, roles: Training) -> Mapping[str, float]:
        evaluator = roles.evaluator(lambda text: None)
        assert evaluator is not None, "the control needs an evaluation"
        await roles.learner.publish(1)
        await roles.engine.update_weights(1)
        metrics = await evaluator.run()
        return {"control/accuracy": metrics["eval/accuracy"]} if "eval/accuracy" in metrics else {}


@asynccontextmanager
async def _asleep(roles: Training) -> AsyncIterator[None]:
    """Before new weights are published: the learner has the engine's memory, if the recipe lets it."""
    if not roles.recipe.rollout.sleep:
        yield
        return
    await roles.engine.sleep()
    yield
    await roles.engine.wake()
