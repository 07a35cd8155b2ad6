"""The whole recipe: every part's config in one model, and the rules that hold between parts."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from lockstep.algorithms.config import AlgorithmConfig
from lockstep.assembly.warmup import WarmupConfig
from lockstep.config import Config, Plugin, plugin
from lockstep.config.layers import Presets
from lockstep.controller.config import CheckpointConfig, TrainConfig
from lockstep.controller.governor import GovernorConfig
from lockstep.learner.config import LearnerConfig
from lockstep.models.loading import ModelConfig
from lockstep.report.recorder import RecorderConfig
from lockstep.rollout.config import RolloutConfig
from lockstep.rollout.evaluate import EvalConfig
from lockstep.tasks.judging import JudgeConfig

METHOD = ("surrogate", "advantage", "correction", "reduction", "dynamic_sampling", "kl")
PRESETS = Presets("lockstep.presets", owns=tuple(f"algorithm.{key}" for key in METHOD), notes="paper")


class Recipe(Config):
    """A run, completely."""

    presets: ClassVar[Presets | None] = PRESETS
    preset: str = ""
    """a paper's settings, under the recipe's own keys: see `lockstep explain`; on the command line, above them"""
    name: str = Field(default="run", pattern=r"^[\w-][\w.-]*$")
    """folder of the run, under runs/"""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """decides initial weights, order of prompts and every sampled token"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one"""
    model: ModelConfig
    task: Annotated[Plugin, plugin("lockstep.tasks")]
    """dataset and reward: a name from lockstep.tasks, or file.py:Class for one of your own"""
    warmup: WarmupConfig | None = None
    algorithm: AlgorithmConfig
    train: TrainConfig
    rollout: RolloutConfig = RolloutConfig()
    learner: LearnerConfig = LearnerConfig()
    eval: EvalConfig = EvalConfig()
    judge: JudgeConfig = JudgeConfig()
    governor: GovernorConfig = GovernorConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    record: RecorderConfig = RecorderConfig()

    @model_validator(mode="after")
    def _sleeps_by_turns(self) -> Recipe:
        if self.rollout.sleep and self.train.max_staleness:
            raise ValueError(
                f"rollout.sleep = true needs train.max_staleness = 0, not {self.train.max_staleness}: with staleness "
                "the engine samples while the learner learns"
            )
        return self

    @model_validator(mode="after")
    def _has_a_whole_task(self) -> Recipe:
        needed = ["samples", "reward", *(["demonstrations"] if self.warmup else [])]
        if missing := [name for name in needed if not callable(getattr(self.task.cls, name, None))]:
            why = ", which the warm-up learns from" if missing == ["demonstrations"] else ""
            raise ValueError(f"task {self.task.name!r} has no method {' and no '.join(missing)}{why}")
        return self

    @model_validator(mode="after")
    def _is_exact_on_both_sides(self) -> Recipe:
        if self.rollout.exact and self.learner.alignment != "aligned":
            raise ValueError(
                f'rollout.exact = true needs learner.alignment = "aligned", not {self.learner.alignment!r}'
            )
        if self.rollout.exact and self.device == "cpu":
            raise ValueError('rollout.exact = true needs a GPU: device = "auto" or "cuda", not "cpu"')
        return self

    @model_validator(mode="after")
    def _samples_what_it_learns(self) -> Recipe:
        """Log-probs of a truncated distribution are not the model's: the correction would correct the wrong thing."""
        if self.train.steps and self.rollout.params().truncates:
            raise ValueError(
                "training needs the model's own distribution: set rollout.temperature > 0 and leave "
                "top_k, top_p and min_p off (the kept set is not replayed in the learner)"
            )
        return self

    @model_validator(mode="after")
    def _can_learn(self) -> Recipe:
        """Combinations that would run to the end and teach nothing, or something else than their names say."""
        advantage = self.algorithm.advantage_plugin
        compares = advantage.cls.scope == "group" and not self.algorithm.needs_values  # type: ignore[attr-defined]
        if self.train.group_size == 1 and compares:
            raise ValueError(
                f"train.group_size = 1: the advantage {advantage.name!r} compares answers to the same prompt, "
                "so every one would be 0; use 2 or more"
            )
        if self.algorithm.companions.one_update and self.learner.num_updates > 1:
            raise ValueError(
                f"the surrogate {self.algorithm.surrogate.name!r} makes one update per step: set learner.mini_steps "
                "and learner.epochs to 1, or take one that clips, such as 'grpo'"
            )
        if self.warmup and self.warmup.control and not self.eval.samples:
            raise ValueError("warmup.control = true needs an evaluation to compare: set eval.samples above 0")
        return self
