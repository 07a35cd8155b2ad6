"""Runs one planned step: lays the chunks out as tensors, calls the model, samples.

Per-row state (block table, sampling parameters) lives in buffers on the device that are written when it changes, so a
decode step sends only what is new. Nothing is read back before `Drawn.tolists`, after the step, so a decode step can be
captured as a CUDA graph once its inputs are padded to a few sizes in fixed buffers; today they are made anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.models.paged import KVCache, PagedStep, Segment
from lockstep.rollout.routes import Recorder
from lockstep.rollout.sampler import SamplingTable, sample
from lockstep.rollout.scheduler import Chunk, Plan
from lockstep.rollout.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Drawn:
    """Sampled tokens and log-probs of a step, still on the device."""

    tokens: Tensor  # [sampling rows] int64
    logp: Tensor  # [sampling rows] float32

    def tolists(self) -> tuple[list[int], list[float]]:
        return self.tokens.tolist(), self.logp.tolist()


class Runner:
    def __init__(
        self,
        module: PreTrainedModel,
        cache: KVCache,
        *,
        max_seqs: int,
        max_pages_per_seq: int,
        recorder: Recorder | None = None,
    ) -> None:
        self.module = module
        self.cache = cache
        self.recorder = recorder
        self.device = cache.keys.device
        self.table = torch.zeros(max_seqs, max_pages_per_seq, dtype=torch.int64, device=self.device)
        self.sampling = SamplingTable(max_seqs, module.config.get_text_config().vocab_size, self.device)
        self._written: list[tuple[int, int]] = [(-1, 0)] * max_seqs  # (seating, pages) of what each row holds

    @torch.inference_mode()
    def run(self, plan: Plan) -> Drawn:
        for chunk in plan.chunks:
            self._write_row(chunk.seq)
        tokens, positions, slots = self._layout(plan.chunks)
        segments = [s for s in (self._decode_segment(plan.decode), self._prefill_segment(plan)) if s is not None]
        ends, last = [], -1
        for chunk in plan.chunks:
            last += chunk.end - chunk.start
            if chunk.samples:
                ends.append(last)
        recording = self.recorder.recording(plan, slots) if self.recorder else None
        step = PagedStep(cache=self.cache, slots=slots, segments=segments, routing=recording)
        logits = self.module(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=self._tensor(ends),
            lockstep=step,
        ).logits[0]
        if recording is not None:
            recording.write()
        return self._sample(logits, [c.seq for c in plan.chunks if c.samples])

    def _sample(self, logits: Tensor, seqs: list[Sequence]) -> Drawn:
        if not seqs:
            return Drawn(torch.empty(0, dtype=torch.int64), torch.empty(0))
        rows, positions = self._tensor([[s.row for s in seqs], [len(s.tokens) for s in seqs]])
        return Drawn(*sample(logits, self.sampling.batch(rows, positions, [s.request.params for s in seqs])))

    def _layout(self, chunks: list[Chunk]) -> tuple[Tensor, Tensor, Tensor]:
        size = self.cache.page_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for chunk in chunks:
            tokens += chunk.seq.tokens[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            slots += [chunk.seq.pages[p // size] * size + p % size for p in range(chunk.start, chunk.end)]
        tokens_N, positions_N, slots_N = self._tensor([tokens, positions, slots])
        return tokens_N, positions_N, slots_N

    def _decode_segment(self, chunks: list[Chunk]) -> Segment | None:
        if not chunks:
            return None
        rows, positions = self._tensor([[c.seq.row for c in chunks], [c.start for c in chunks]])
        return Segment(rows=slice(0, len(chunks)), pages=self._pages(rows, chunks), positions=positions[:, None])

    def _prefill_segment(self, plan: Plan) -> Segment | None:
        chunks = plan.prefill
        if not chunks:
            return None
        longest = max(c.end - c.start for c in chunks)
        query_index: list[list[int]] = []
        positions: list[list[int]] = []
        token_index: list[int] = []
        first = 0
        for number, chunk in enumerate(chunks):
            size = chunk.end - chunk.start
            padding = [0] * (longest - size)
            query_index.append([*range(first, first + size), *padding])
            positions.append([*range(chunk.start, chunk.end), *padding])  # position 0 sees a key, so no row is empty
            token_index += range(number * longest, number * longest + size)
            first += size
        num_decode = len(plan.decode)
        return Segment(
            rows=slice(num_decode, num_decode + first),
            pages=self._pages(self._tensor([c.seq.row for c in chunks]), chunks),
            positions=self._tensor(positions),
            query_index=self._tensor(query_index),
            token_index=self._tensor(token_index),
        )

    def _pages(self, rows: Tensor, chunks: list[Chunk]) -> Tensor:
        num_pages = max(-(-c.end // self.cache.page_size) for c in chunks)
        return self.table[rows, :num_pages]

    def _write_row(self, seq: Sequence) -> None:
        seating, num_pages = self._written[seq.row]
        if seating != seq.seating:
            self.sampling.write(seq.row, seq.request.params)
        elif num_pages == len(seq.pages):  # pages only grow while a sequence holds its row
            return
        self.table[seq.row, : len(seq.pages)] = self._tensor(seq.pages)
        self._written[seq.row] = (seq.seating, len(seq.pages))

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
