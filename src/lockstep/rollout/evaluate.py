"""Held-out evaluation through the very engine, template and precision that training samples with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pydantic import Field

from lockstep.config import Config
from lockstep.rollout.worker import Answerer
from lockstep.types import LEAST_TEMPERATURE, Sample, Trajectory


class EvalConfig(Config):
    """Held-out evaluation."""

    every: int = Field(default=0, ge=0)
    """steps between evaluations; there is always one before the first step and one after the last"""
    samples: int = Field(default=256, ge=0)
    """held-out problems used; 0 turns evaluation off"""
    k: int = Field(default=0, ge=0)
    """besides the greedy answer, k sampled ones per problem for avg@k and pass@k; 0: greedy only"""
    temperature: float = Field(default=1.0, ge=LEAST_TEMPERATURE)
    """of the k sampled answers"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Evaluates with `answerer`, whose sampling parameters give the token limit and stop strings."""

    answerer: Answerer
    samples: Sequence[Sample]
    config: EvalConfig

    async def run(self, on_answer: Callable[[Sample, Trajectory], None] | None = None) -> dict[str, float]:
        """There is no accuracy where no answer could be judged.

        consumes: the held-out samples · waits for: the engine and the judge
        """
        greedy = [a for group in await self._answers("eval", 0.0, 1) for a in group]
        if on_answer:
            for sample, answer in zip(self.samples, greedy, strict=True):
                on_answer(sample, answer)
        judged = [a for a in greedy if not a.verdict.failed]
        metrics = {
            **shares("eval/accuracy", [a.verdict.is_correct for a in judged]),
            "eval/length": mean([a.num_sampled for a in greedy]),
            "eval/truncated": mean([a.truncated for a in greedy]),
            "eval/failed": float(len(greedy) - len(judged)),
        }
        return metrics | (await self._at_k() if self.config.k else {})

    async def _at_k(self) -> dict[str, float]:
        groups = await self._answers("eval-k", self.config.temperature, self.config.k)
        correct = [[a.verdict.is_correct for a in group if not a.verdict.failed] for group in groups]
        return {
            **shares("eval/avg_at_k", [value for group in correct for value in group]),
            **shares("eval/pass_at_k", [any(group) for group in correct if group]),
        }

    async def _answers(self, name: str, temperature: float, num_answers: int) -> list[list[Trajectory]]:
        params = replace(self.answerer.params, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
        answerer = replace(self.answerer, params=params)
        tasks = [asyncio.create_task(answerer.answers(f"{name}/{s.uid}", s, num_answers)) for s in self.samples]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # if one failed, nobody waits for the others
                task.cancel()


def shares(name: str, values: Sequence[bool]) -> dict[str, float]:
    """The metric, if there is anything to measure."""
    return {name: mean(values)} if values else {}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
