"""How answers are sampled, and what the engine may use."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from lockstep.config import Config, Plugin, plugin
from lockstep.quant import FORMATS
from lockstep.quant.ladder import HIGH, batch_invariant
from lockstep.types import LEAST_TEMPERATURE, SamplingParams

UpdatePolicy = Literal["keep_kv", "reprefill", "drain"]


class RolloutConfig(Config):
    """How answers are sampled in training."""

    engine: Annotated[Plugin, plugin("lockstep.rollout.engines")] = Field(default="embedded", validate_default=True)  # type: ignore[assignment]
    """what samples"""
    precision: Annotated[Plugin | None, plugin(FORMATS, nothing=HIGH)] = None
    """low-bit format of the engine's matrices; unset, or "high": the precision the learner computes in"""
    max_tokens: int = Field(default=256, ge=1)
    """longest answer; a longer one is cut off and counted as truncated"""
    temperature: float = Field(default=1.0, ge=0)
    """of training samples; evaluation has its own"""
    top_k: int = Field(default=0, ge=0)
    """refused in training: the learner does not replay the kept set"""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """refused in training, as top_k"""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """refused in training, as top_k"""
    stop: tuple[str, ...] = ()
    """strings that end an answer, besides the model's own end of turn"""
    max_seqs: int = Field(default=256, ge=1)
    """sequences that run at once"""
    step_tokens: int = Field(default=4096, ge=16)
    """tokens computed in one engine step, at most: longer prompts are prefilled in chunks"""
    kv_gib: float | None = Field(default=None, gt=0)
    """memory for keys and values, at most; unset: on a GPU most of what a learner on it leaves, on a CPU 2"""
    kv_precision: Literal["high", "fp8"] = "high"
    """keys and values in the model's precision, or in 8 bits, scaled by head and token: half the memory"""
    exact: bool = False
    """on a GPU, in int8_w8a8, w4a8 or fp8_w8a8 with blocks: log-probs are the same bits in engine and learner"""
    sleep: bool = False
    """its memory is the learner's while that learns, which begins when the last answer is there; without staleness"""
    compile: bool = True
    """on a GPU: decode steps as CUDA graphs, many in a row; without, each step is launched by itself"""
    update: UpdatePolicy = "keep_kv"
    """running answers when new weights arrive: go on with old keys and values, recompute them, or finish first"""

    @field_validator("temperature")
    @classmethod
    def _within_float32(cls, temperature: float) -> float:
        if 0 < temperature < LEAST_TEMPERATURE:
            raise ValueError(f"must be 0, which is greedy, or at least {LEAST_TEMPERATURE:g}")
        return temperature

    @field_validator("stop")
    @classmethod
    def _refuse_empty(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if not all(stop):
            raise ValueError(f"{list(stop)} has an empty string, which would end every answer at once")
        return stop

    @model_validator(mode="after")
    def _can_be_exact(self) -> RolloutConfig:
        if not self.exact:
            return self
        if not batch_invariant(self.precision):
            name = HIGH if self.precision is None else self.precision.name
            raise ValueError(
                f"exact = true needs the precision int8_w8a8, w4a8 or fp8_w8a8 with block = true, not {name!r}: there "
                "what a token gets depends on what is computed with it"
            )
        if self.kv_precision != "high":
            raise ValueError(
                f'exact = true needs kv_precision = "high", not {self.kv_precision!r}: the learner keeps no keys and '
                "values"
            )
        return self

    def params(self, seed: int = 0) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            stop=self.stop,
            seed=seed,
        )
