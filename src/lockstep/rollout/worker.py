"""From a prompt to a judged group on the bus."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from transformers import PreTrainedTokenizerBase

from lockstep.config import ConfigError
from lockstep.data.chat import Conversation, render_prompt, response_text
from lockstep.data.flaws import flaws
from lockstep.protocols import Bus, Engine, Judge
from lockstep.types import (
    Completion,
    Group,
    GroupReceipt,
    Request,
    Sample,
    SamplingParams,
    StopReason,
    Trajectory,
    negative,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answerer:
    """Samples answers to one problem and has them judged, each as soon as it is finished."""

    engine: Engine
    judge: Judge
    tokenizer: PreTrainedTokenizerBase
    params: SamplingParams
    seed: int

    async def answers(self, name: str, sample: Sample, num_answers: int) -> list[Trajectory]:
        """consumes: one sample · waits for: the engine, then the judge · cancelling it aborts the requests"""
        prompt = tuple(self._prompt(sample))
        requests = [self._request(f"{name}/{n}", prompt) for n in range(num_answers)]
        judging: dict[str, asyncio.Task[Trajectory]] = {}
        try:
            async for completion in self.engine.generate(requests):
                if completion.stop_reason is not StopReason.ABORTED:
                    judging[completion.uid] = asyncio.create_task(self._judged(sample, prompt, completion))
            return [await judging[r.uid] for r in requests if r.uid in judging]
        finally:
            for task in judging.values():
                task.cancel()

    def prompt_length(self, sample: Sample) -> int:
        return len(self._prompt(sample))

    def _prompt(self, sample: Sample) -> list[int]:
        try:
            return render_prompt(self.tokenizer, sample.messages)
        except ConfigError as error:
            raise ConfigError(f"sample {sample.uid!r}: {error}") from error

    def _request(self, uid: str, prompt: tuple[int, ...]) -> Request:
        """A seed of its own for every answer of every prompt, the same in every run with this seed."""
        digest = blake2b(f"{self.seed}/{uid}".encode(), digest_size=8).digest()
        return Request(uid=uid, tokens=prompt, params=replace(self.params, seed=int.from_bytes(digest, "little") >> 1))

    async def _judged(self, sample: Sample, prompt: Sequence[int], completion: Completion) -> Trajectory:
        text = response_text(self.tokenizer, completion.tokens)
        verdict = await self.judge(sample, text)
        wrong = flaws(completion.tokens, text, cut_off=completion.stop_reason is StopReason.LENGTH)
        conversation = Conversation()
        conversation.observe(prompt)
        conversation.sampled(completion)
        return conversation.trajectory(
            uid=completion.uid, text=text, verdict=verdict, temperature=self.params.temperature, flaws=wrong
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRollout:
    """Implements protocols.Rollout."""

    answerer: Answerer
    bus: Bus
    group_size: int
    context: int
    train_truncated: bool  # whether answers that were cut off are learned from

    async def run(self, index: int, sample: Sample, version: int) -> GroupReceipt:
        """A prompt that leaves no room for an answer gives an empty group: counted, never trained."""
        too_long = self.answerer.prompt_length(sample) >= self.context
        answers = [] if too_long else await self.answerer.answers(str(index), sample, self.group_size)
        await self.bus.put(Group(index=index, sample=sample, version=version, trajectories=tuple(answers)))
        return replace(receipt(index, answers, self.train_truncated), too_long=too_long)


def receipt(index: int, answers: Sequence[Trajectory], train_truncated: bool) -> GroupReceipt:
    parts: dict[str, list[float]] = defaultdict(list)
    trained = {a.verdict.value for a in answers if train_truncated or not a.truncated} - {None}
    judged = [a.verdict for a in answers if not a.verdict.failed]
    bad = negative(answers)
    for verdict in judged:
        for name, value in verdict.parts.items():
            parts[name].append(value)
    return GroupReceipt(
        index=index,
        rewards=tuple(v.value for v in judged if v.value is not None),
        num_failed=len(answers) - len(judged),
        failure=next((reason for a in answers if a.verdict.failed for reason in a.verdict.reasons), ""),
        num_truncated=sum(a.truncated for a in answers),
        num_tokens=sum(a.num_sampled for a in answers),
        has_signal=len(trained) > 1,
        parts={name: tuple(values) for name, values in parts.items()},
        num_negative=len(bad),
        flaws=Counter(flaw for answer in bad for flaw in answer.flaws),
    )
