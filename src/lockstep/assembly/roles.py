"""From a recipe to the roles of one process: the model loaded and checked once, seen by engine and learner alike.

Who owns the weights. The learner trains the loaded module itself; the engine has a twin of it, made before the learner
changes attention and head. When sampling and learning take turns, on one rank, the twin's tensors *are* the learner's:
an update is in place at once and publishing copies nothing. Otherwise the twin has tensors of its own, and a version
goes learner -> store (a snapshot) -> engine (between two of its steps).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

from torch import Tensor

from lockstep.assembly.devices import choose_device
from lockstep.assembly.estimate import gib_for_learner, most_kv_gib
from lockstep.assembly.recipe import Recipe
from lockstep.bus import memory as bus_memory
from lockstep.config import ConfigError
from lockstep.data.order import PromptOrder
from lockstep.learner.local import LocalLearner
from lockstep.learner.ranks import Ranks
from lockstep.learner.step import LearnerCore
from lockstep.learner.update_scale import UpdateScale
from lockstep.models import loading
from lockstep.models.exact import make_exact
from lockstep.models.head import install_head
from lockstep.models.learner_view import use_learner_view
from lockstep.models.loading import Loaded, ModelConfig
from lockstep.models.lowbit import LowBitWeights
from lockstep.models.routing import Routers, find_routers, install_routing
from lockstep.models.selfcheck import self_check
from lockstep.protocols import Bus, Engine, Recorder, Task
from lockstep.rollout.budget import kv_gib
from lockstep.rollout.evaluate import Evaluator
from lockstep.rollout.worker import Answerer, GroupRollout
from lockstep.tasks.judging import Judge
from lockstep.types import Sample
from lockstep.weights import memory as weights_memory


def load_model(recipe: Recipe, checkpoint: Path | str | None = None) -> Loaded:
    """The recipe's model, or the one in a checkpoint of its run; checked against plain transformers either way.

    ConfigError if the recipe asks for exactness that this model, or this device, does not have."""
    device = choose_device(recipe.device)
    config = recipe.model
    if checkpoint is not None:
        config = ModelConfig(path=str(checkpoint), float32_logits=config.float32_logits)
    loaded = loading.load(config, dtype=recipe.learner.torch_dtype(device), device=device, seed=recipe.seed)
    self_check(loaded.module)
    if recipe.rollout.exact:
        make_exact(loaded.module)
    return loaded


class Sampling:
    """What samples and judges: enough to evaluate or generate; training adds a learner."""

    def __init__(
        self,
        recipe: Recipe,
        loaded: Loaded,
        *,
        share: bool = True,
        routers: Routers | None = None,
        leave_gib: float = 0.0,
    ) -> None:
        """`share`: the engine reads the loaded module's own memory; otherwise it gets buffers of its own.

        `routers`: answers bring the experts that these choose. `leave_gib`: of the device's memory, for a learner.
        """
        self.recipe = recipe
        self.loaded = loaded
        self.store = weights_memory.Memory(snapshot=not share)
        self.low_bit = low_bit_weights(recipe, loaded)
        budget = kv_gib(recipe.rollout, loaded.module.device, leave_gib)
        config = recipe.rollout.model_copy(update={"kv_gib": budget})
        self.kv_gib = min(budget, most_kv_gib(recipe, loaded.module))
        start = recipe.rollout.engine.cls.start  # type: ignore[attr-defined]
        self.engine: Engine = start(loaded, config, None if share else self.store, self.low_bit, routers)

    @cached_property
    def task(self) -> Task:
        return self.recipe.task.build()

    @cached_property
    def judge(self) -> Judge:
        config = self.recipe.judge
        return Judge(self.recipe.task.build, time_limit=config.time_limit, workers=config.workers)

    @cached_property
    def answerer(self) -> Answerer:
        return Answerer(
            engine=self.engine,
            judge=self.judge,
            tokenizer=self.loaded.tokenizer,
            params=self.recipe.rollout.params(),
            seed=self.recipe.seed,
        )

    def evaluator(self, warn: Callable[[str], None]) -> Evaluator | None:
        """None if the recipe turns evaluation off. Prompts that do not fit are left out, with a warning."""
        config = self.recipe.eval
        if not config.samples:
            return None
        chosen = list(self.task.samples("eval")[: config.samples])
        if not chosen:
            raise ConfigError(f"task {self.recipe.task.name!r} has no held-out samples; eval.samples=0 does without")
        fitting = [s for s in chosen if self.answerer.prompt_length(s) < self.loaded.context]
        if not fitting:
            raise ConfigError(f"none of the {len(chosen)} held-out prompts fits the context of {self.loaded.context}")
        if len(fitting) < len(chosen):
            warn(f"{len(chosen) - len(fitting)} of {len(chosen)} held-out prompts do not fit the context; left out")
        return Evaluator(answerer=self.answerer, samples=fitting, config=config)

    async def close(self) -> None:
        await self.engine.close()
        if "judge" in vars(self):
            await self.judge.close()


class Training(Sampling):
    """All roles of a training run on this process."""

    def __init__(self, recipe: Recipe, loaded: Loaded, recorder: Recorder, *, version: int = 0) -> None:
        ranks = Ranks.current(loaded.module.device)
        share = recipe.train.max_staleness == 0 and ranks.world == 1
        routers = routers_of(recipe, loaded, lambda text: recorder.event(version, "routing", text))
        planned = recipe.rollout.kv_gib is None and loaded.module.device.type == "cuda"
        leave = gib_for_learner(recipe, loaded.module, ranks.world) if planned else 0.0
        super().__init__(recipe, loaded, share=share, routers=routers, leave_gib=leave)
        if planned:
            took = f"keys and values take {self.kv_gib:.1f} GiB of the GPU, {leave:.1f} are left for learning"
            recorder.event(version, "memory", f"{took}; rollout.kv_gib sets it")
        self.bus: Bus = bus_memory.Memory()
        self.core = learner_core(recipe, loaded, ranks, self.low_bit, routers)
        self.learner = LocalLearner(
            self.core,
            self.bus,
            self.store,
            save_weights=self._save_weights,
            on_group=recorder.samples,
            version=version,
        )
        self.rollout = GroupRollout(
            answerer=self.answerer,
            bus=self.bus,
            group_size=recipe.train.group_size,
            context=loaded.context,
            train_truncated=recipe.algorithm.truncated == "keep",
        )

    @cached_property
    def prompts(self) -> Callable[[int], Sample]:
        """Sample at a place of the run's order."""
        samples = self.task.samples("train")
        if not samples:
            raise ConfigError(f"task {self.recipe.task.name!r} has no training samples")
        order = PromptOrder(len(samples), self.recipe.seed)
        probe = [samples[order[i]] for i in range(min(len(samples), 32))]
        if all(self.answerer.prompt_length(s) >= self.loaded.context for s in probe):
            raise ConfigError(f"none of {len(probe)} prompts fits the model's context of {self.loaded.context} tokens")
        return lambda index: samples[order[index]]

    def check_reference(self) -> None:
        """The model a KL term holds the policy to scores the same tokens, so it must mean the same by them."""
        kl = self.recipe.algorithm.kl
        path = kl.reference if kl else ""
        if path and loading.load_tokenizer(path).get_vocab() != self.loaded.tokenizer.get_vocab():
            raise ConfigError(f"algorithm.kl.reference = {path!r}: its tokenizer is not that of the model")

    def _save_weights(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        loading.save(folder, self.loaded, weights)

    async def close(self) -> None:
        await self.learner.close()
        await super().close()


def low_bit_weights(recipe: Recipe, loaded: Loaded) -> LowBitWeights | None:
    """What the engine runs in place of the matrices; None in high precision. Before anything changes the module."""
    if recipe.rollout.precision is None:
        return None
    return LowBitWeights(loaded.module, recipe.rollout.precision, updates_per_version=recipe.learner.num_updates)


def routers_of(recipe: Recipe, loaded: Loaded, tell: Callable[[str], None] = lambda text: None) -> Routers | None:
    """Whose choices are recorded and compared, whatever `learner.routing` makes of them; None in a dense model.

    A mixture whose routers cannot be followed is refused; where nothing is to be replayed, it is told and left alone.
    """
    try:
        return find_routers(loaded.module)
    except ConfigError as refused:
        if recipe.learner.routing != "off":
            raise ConfigError(f'{refused}; learner.routing = "off" trains without') from None
        tell(f"experts are neither recorded nor compared: {refused}")
        return None


def learner_core(
    recipe: Recipe, loaded: Loaded, ranks: Ranks, low_bit: LowBitWeights | None, routers: Routers | None
) -> LearnerCore:
    """The learner of this rank, which trains the loaded module itself."""
    update_scale = UpdateScale.of(loaded.module, recipe.learner)
    become_learner(recipe, loaded, low_bit, routers)
    num_updates = recipe.train.steps * recipe.learner.num_updates
    return LearnerCore(
        loaded.module,
        recipe.algorithm,
        recipe.learner,
        num_updates=num_updates,
        ranks=ranks,
        update_scale=update_scale,
        low_bit=low_bit,
        routers=routers,
    )


def become_learner(recipe: Recipe, loaded: Loaded, low_bit: LowBitWeights | None, routers: Routers | None) -> None:
    """Makes the loaded module what the learner runs: its view of the model, a log-prob head, routers that obey and,
    where it is to compute what the engine computes, low-bit matrices."""
    use_learner_view(loaded.module)
    install_head(loaded.module, with_value=recipe.algorithm.needs_values)
    if low_bit is not None and recipe.learner.alignment == "aligned":
        low_bit.run_by_learner(loaded.module)
    if routers is not None:
        install_routing(loaded.module, routers)
