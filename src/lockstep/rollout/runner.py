"""Runs a plan: lays the chunks out as tensors, calls the model, samples.

A step is laid out anew each time. Where only answers go on, and the device can, `Burst` runs many steps in a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.models.kv import KVCache
from lockstep.models.paged import PagedStep, Segment
from lockstep.rollout.burst import Burst
from lockstep.rollout.routes import Recorder
from lockstep.rollout.rows import Rows
from lockstep.rollout.sampler import sample, truncated
from lockstep.rollout.scheduler import Chunk, Draws, Plan
from lockstep.rollout.sequence import Sequence
from lockstep.rollout.transfer import Flight, send


@dataclass(frozen=True, slots=True)
class Inputs:
    """Of one step: N tokens, of which S are each followed by a sampled one."""

    tokens: Tensor  # [N]
    positions: Tensor  # [N]
    slots: Tensor  # [N] where keys and values go
    segments: list[Segment]
    kept: Tensor | int  # [S] the tokens whose logits are needed; 0: all
    rows: Tensor  # [S] of who samples
    drawn: Tensor  # [S] positions of what is sampled


class Runner:
    def __init__(
        self,
        module: PreTrainedModel,
        cache: KVCache,
        rows: Rows,
        *,
        recorder: Recorder | None = None,
        burst: Burst | None = None,
    ) -> None:
        self.module = module
        self.cache = cache
        self.rows = rows
        self.recorder = recorder
        self.burst = burst
        self.device = cache.keys.device
        self._steps: deque[Flight] = deque()  # tokens and log-probs of steps by themselves

    def launch(self, plan: Plan) -> None:
        """On a GPU it returns before it is computed: what follows it may be launched, and then the first collected."""
        if self.burst is not None and not plan.prefill:
            self.burst.launch(plan)
        else:
            self._steps.append(Flight(*self._run_once(plan)))

    def collect(self) -> list[Draws]:
        """What each sampling chunk of the plan launched first drew, in order. Bursts are never under way together with
        steps by themselves."""
        if not self._steps:
            assert self.burst is not None
            return self.burst.collect()
        tokens, logp = self._steps.popleft().land()
        return [([t], [p]) for t, p in zip(tokens.tolist(), logp.tolist(), strict=True)]

    @torch.inference_mode()
    def _run_once(self, plan: Plan) -> tuple[Tensor, Tensor]:
        self.rows.write([chunk.seq for chunk in plan.chunks])
        inputs = self._lay_out(plan) if plan.prefill else self._lay_out_decode(plan.decode)
        recording = self.recorder.recording(plan, inputs.slots) if self.recorder else None
        step = PagedStep(cache=self.cache, slots=inputs.slots, segments=inputs.segments, routing=recording)
        logits = self.module(
            input_ids=inputs.tokens[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            logits_to_keep=inputs.kept,
            lockstep=step,
        ).logits[0]
        if recording is not None:
            recording.write()
        return self._sample(logits, [c.seq for c in plan.chunks if c.samples], inputs.rows, inputs.drawn)

    def _lay_out_decode(self, chunks: list[Chunk]) -> Inputs:
        """One token each, and everyone samples: the host knows all places, and hands them over at once."""
        size = self.cache.page_size
        known = [(c.seq.tokens[-1], c.seq.row, c.start, _slot(c.seq.pages, c.start, size)) for c in chunks]
        tokens, rows, positions, slots = self._tensor([*zip(*known, strict=True)])
        segment = self._segment(chunks, rows, positions, None, first=0)
        return Inputs(tokens, positions, slots, [segment], kept=0, rows=rows, drawn=positions + 1)

    def _lay_out(self, plan: Plan) -> Inputs:
        chunks, num_decode = plan.chunks, len(plan.decode)
        tokens = self._tensor([t for c in chunks for t in c.seq.tokens[c.start : c.end]])
        rows, start, count = self._tensor([[c.seq.row, c.start, c.end - c.start] for c in chunks]).T.contiguous()
        positions, slots = self._places(rows, start, count, len(tokens))
        prefill = rows[num_decode:], start[num_decode:], count[num_decode:]
        segments = [self._segment(plan.prefill, *prefill, first=num_decode)]
        if plan.decode:
            segments.insert(0, self._segment(plan.decode, rows[:num_decode], start[:num_decode], None, first=0))
        samples = self._tensor([number for number, c in enumerate(chunks) if c.samples])
        last = count.cumsum(0)[samples] - 1
        return Inputs(tokens, positions, slots, segments, kept=last, rows=rows[samples], drawn=positions[last] + 1)

    def _places(self, rows: Tensor, start: Tensor, count: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Of every token, its position and where its key and value go."""
        size = self.cache.page_size
        chunk = torch.repeat_interleave(torch.arange(len(count), device=self.device), count, output_size=num_tokens)
        first = count.cumsum(0) - count
        positions = start[chunk] + torch.arange(num_tokens, device=self.device) - first[chunk]
        return positions, self.rows.table[rows[chunk], positions // size] * size + positions % size

    def _segment(
        self, chunks: list[Chunk], rows: Tensor, start: Tensor, count: Tensor | None, *, first: int
    ) -> Segment:
        sizes = [c.end - c.start for c in chunks]
        pages = self.rows.pages(rows, max(-(-c.end // self.cache.page_size) for c in chunks))
        return Segment(rows=slice(first, first + sum(sizes)), pages=pages, start=start, count=count, longest=max(sizes))

    def _sample(self, logits: Tensor, seqs: list[Sequence], rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if not seqs:
            return torch.empty(0, dtype=torch.int64), torch.empty(0)
        params = [s.request.params for s in seqs]
        any_greedy, any_truncated = any(p.temperature == 0 for p in params), any(map(truncated, params))
        batch = self.rows.sampling.batch(rows, positions, any_greedy=any_greedy, any_truncated=any_truncated)
        return sample(logits, batch)

    def _tensor(self, values: Seq[int] | Seq[Seq[int]]) -> Tensor:
        return send(values, self.device)


def _slot(pages: list[int], position: int, page_size: int) -> int:
    return pages[position // page_size] * page_size + position % page_size
