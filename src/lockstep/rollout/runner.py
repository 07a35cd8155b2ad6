"""Runs a plan: lays the chunks out as tensors, calls the model, samples.

Steps with prompts in them are laid out anew each time. Where only answers go on, and the device can, `Burst` runs many
steps in a row.
"""

from __future__ import annotations

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
        self._mixed: tuple[Tensor, Tensor] | None = None  # tokens and log-probs

    def launch(self, plan: Plan) -> None:
        """A burst returns before it is computed: another may be launched, and then the first one collected."""
        if self.burst is not None and not plan.prefill:
            self.burst.launch(plan)
        else:
            self._mixed = self._run_mixed(plan)

    def collect(self) -> list[Draws]:
        """What each sampling chunk of the plan launched first drew, in order."""
        if self._mixed is None:
            assert self.burst is not None
            return self.burst.collect()
        (tokens, logp), self._mixed = self._mixed, None
        return [([t], [p]) for t, p in zip(tokens.tolist(), logp.tolist(), strict=True)]

    @torch.inference_mode()
    def _run_mixed(self, plan: Plan) -> tuple[Tensor, Tensor]:
        self.rows.write([chunk.seq for chunk in plan.chunks])
        chunks, num_decode = plan.chunks, len(plan.decode)
        tokens = self._tensor([t for c in chunks for t in c.seq.tokens[c.start : c.end]])
        rows, start, count = self._tensor([[c.seq.row, c.start, c.end - c.start] for c in chunks]).T.contiguous()
        positions, slots = self._places(rows, start, count, len(tokens))
        segments = [
            self._segment(plan.decode, rows[:num_decode], start[:num_decode], None, first=0),
            self._segment(plan.prefill, rows[num_decode:], start[num_decode:], count[num_decode:], first=num_decode),
        ]
        recording = self.recorder.recording(plan, slots) if self.recorder else None
        step = PagedStep(cache=self.cache, slots=slots, segments=[s for s in segments if s], routing=recording)
        samples = self._tensor([number for number, c in enumerate(chunks) if c.samples])
        logits = self.module(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=count.cumsum(0)[samples] - 1,
            lockstep=step,
        ).logits[0]
        if recording is not None:
            recording.write()
        return self._sample(logits, [c.seq for c in chunks if c.samples])

    def _places(self, rows: Tensor, start: Tensor, count: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Of every token, its position and where its key and value go."""
        size = self.cache.page_size
        chunk = torch.repeat_interleave(torch.arange(len(count), device=self.device), count, output_size=num_tokens)
        first = count.cumsum(0) - count
        positions = start[chunk] + torch.arange(num_tokens, device=self.device) - first[chunk]
        return positions, self.rows.table[rows[chunk], positions // size] * size + positions % size

    def _segment(
        self, chunks: list[Chunk], rows: Tensor, start: Tensor, count: Tensor | None, *, first: int
    ) -> Segment | None:
        if not chunks:
            return None
        sizes = [c.end - c.start for c in chunks]
        pages = self.rows.pages(rows, max(-(-c.end // self.cache.page_size) for c in chunks))
        return Segment(rows=slice(first, first + sum(sizes)), pages=pages, start=start, count=count, longest=max(sizes))

    def _sample(self, logits: Tensor, seqs: list[Sequence]) -> tuple[Tensor, Tensor]:
        if not seqs:
            return torch.empty(0, dtype=torch.int64), torch.empty(0)
        rows, positions = self._tensor([[s.row for s in seqs], [len(s.tokens) for s in seqs]])
        params = [s.request.params for s in seqs]
        any_greedy, any_truncated = any(p.temperature == 0 for p in params), any(map(truncated, params))
        batch = self.rows.sampling.batch(rows, positions, any_greedy=any_greedy, any_truncated=any_truncated)
        return sample(logits, batch)

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
