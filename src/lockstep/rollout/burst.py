"""Decode steps in a row without asking the host: tokens, log-probs, stops and positions stay on the device.

A step is captured once per batch size (rounded up to a few) as a CUDA graph: model, sampling and bookkeeping, launched
by one call. The host writes the state of a burst, replays the graph as often as the plan says and, while the next burst
is computed, takes in what was drawn. A sequence that ends within a burst idles: it writes to a page that nobody reads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.config import ConfigError
from lockstep.models import kernels
from lockstep.models.few_rows import for_capture
from lockstep.models.kernels.rehearsal import rehearse
from lockstep.models.kv import KVCache
from lockstep.models.paged import PagedStep, Segment, Shared, deal
from lockstep.models.routes import Recording, RouteMemory
from lockstep.quant.kernels.counters import Counters
from lockstep.rollout.burst_state import Places, State, look_up, move_on
from lockstep.rollout.rows import Rows
from lockstep.rollout.sampler import SamplingBatch, sample, truncated
from lockstep.rollout.scheduler import Draws, Plan
from lockstep.rollout.sequence import Sequence
from lockstep.rollout.sharing import alone, as_rows, find_neighbours, pays
from lockstep.rollout.transfer import Flight, send

STEPS = 32  # decode steps between two looks of the host, at most


class Kind(NamedTuple):
    """What a captured step depends on."""

    size: int  # of the batch
    truncated: bool = False  # somebody samples with top-k, top-p or min-p
    sharing: bool = False  # neighbours read common pages once


class Burst:
    """`cache` has one page more than the scheduler knows of, the last."""

    def __init__(
        self,
        module: PreTrainedModel,
        cache: KVCache,
        rows: Rows,
        end_tokens: Seq[int],
        routes: RouteMemory | None = None,
    ) -> None:
        self.module, self.cache, self.rows, self.routes = module, cache, rows, routes
        device, size = cache.keys.device, rows.nobody
        self.sizes = batch_sizes(size)
        self._ends = torch.tensor(sorted(end_tokens) or [-1], device=device)
        self._state = torch.zeros(len(State._fields), self.sizes[-1], dtype=torch.int64, device=device)
        self._shared = torch.tensor(as_rows(alone(self.sizes[-1]), self.sizes[-1], 0), device=device)
        self._tokens = torch.zeros(STEPS, self.sizes[-1], dtype=torch.int64, device=device)
        self._logp = torch.zeros(STEPS, self.sizes[-1], device=device)
        self._kind, self._begin = Kind(self.sizes[0]), [0]  # of the burst under way, and where its rows began
        self._flights: deque[Flight] = deque()
        self._graphs: dict[Kind, torch.cuda.CUDAGraph] = {}
        self._counters: Counters = {}  # of what is captured
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._idle_slot = cache.num_pages * cache.page_size - 1  # of the page that nobody reads
        self._num_queries: int = module.config.get_text_config().num_attention_heads

    def warm_up(self) -> None:
        """Captures every batch size, with and without common pages, largest first: smaller ones then fit into its
        memory. Truncated sampling, which is not for training, is captured when it is first asked for.

        ConfigError if the model does something in a step that cannot be captured.
        """
        if self._pool is None:
            return
        sizes = reversed(self.sizes)
        try:
            self._capture([Kind(size, sharing=sharing) for size in sizes for sharing in (False, True)[: min(size, 2)]])
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"decode steps of {type(self.module).__name__} cannot be captured: {reason}; "
                "rollout.compile = false launches them one by one"
            ) from error

    @torch.inference_mode()
    def launch(self, plan: Plan) -> None:
        """Returns before it is computed. What follows a burst goes on from the state it leaves on the device."""
        seqs = [chunk.seq for chunk in plan.decode]
        graph = self._continue(seqs) if plan.follows else self._prepare(plan, seqs)
        self.rows.write([seq for seq in seqs if seq.row >= 0])
        state = State(*self._state)
        state.step.zero_()
        for _ in range(plan.steps):
            graph.replay() if graph else self._run_step(self._kind)
        drawn = (x[: plan.steps, : len(seqs)].T.contiguous() for x in (self._tokens, self._logp))
        self._flights.append(Flight(*drawn, state.positions[: len(seqs)]))

    def collect(self) -> list[Draws]:
        """Of the burst launched longest ago: what each sequence drew until it ended or the burst did."""
        tokens, logp, end = (x.tolist() for x in self._flights.popleft().land())
        counts = [e - b for b, e in zip(self._begin, end, strict=True)]
        self._begin = end
        return [(t[:n], p[:n]) for t, p, n in zip(tokens, logp, counts, strict=True)]

    def _continue(self, seqs: list[Sequence]) -> torch.cuda.CUDAGraph | None:
        """The device does not know who was ended by the host (a stop string, an abort): they idle from now on, because
        their pages are not theirs any more."""
        gone = [place for place, seq in enumerate(seqs) if seq.row < 0]
        if gone:
            State(*self._state).last.index_fill_(0, send(gone, self._state.device), 0)
        return self._graph(self._kind)

    def _prepare(self, plan: Plan, seqs: list[Sequence]) -> torch.cuda.CUDAGraph | None:
        size = self.sizes[bisect_left(self.sizes, len(seqs))]
        groups = find_neighbours([seq.pages for seq in seqs])
        sharing = pays(groups, sum(len(seq.pages) for seq in seqs))
        self._kind = Kind(size, any(truncated(seq.request.params) for seq in seqs), sharing)
        graph = self._graph(self._kind)  # before the state is written: a capture overwrites it
        self._begin = [chunk.start for chunk in plan.decode]
        empty = [0] * (size - len(seqs))
        state = [
            [*(seq.row for seq in seqs), *(self.rows.nobody for _ in empty)],
            [*(seq.tokens[-1] for seq in seqs), *empty],
            [*self._begin, *empty],
            [*(seq.limit - 1 for seq in seqs), *empty],
        ]
        self._state[:-1, :size] = torch.tensor(state, dtype=torch.int64)  # all but the step
        if sharing:
            groups += alone(size, first=len(seqs))
            self._shared[:, :size] = torch.tensor(as_rows(groups, size, self.cache.page_size))
        return graph

    def _graph(self, kind: Kind) -> torch.cuda.CUDAGraph | None:
        if self._pool is None:
            return None
        if kind not in self._graphs:
            self._capture([kind])
        return self._graphs[kind]

    @torch.inference_mode()
    def _capture(self, kinds: list[Kind]) -> None:
        """With rows that belong to nobody and have nothing left to draw. Somebody's keys and values may be there."""
        self._state.zero_()
        State(*self._state).rows.fill_(self.rows.nobody)
        idle = torch.full_like(self._state[0], self._idle_slot)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        # kernels are compiled and libraries set up outside of the captures
        with torch.cuda.stream(side), for_capture(self._counters):
            rehearse(lambda: [self._run_step(kind, idle[: kind.size]) for kind in kinds], self._state.device)
        torch.cuda.current_stream().wait_stream(side)
        for kind in kinds:
            graph = torch.cuda.CUDAGraph()
            # only this thread is held to what a capture allows: a learner's may be at work
            capture = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
            with capture, for_capture(self._counters):
                self._run_step(kind)
            self._graphs[kind] = graph

    def _run_step(self, kind: Kind, slots: Tensor | None = None) -> None:
        """One token for everyone who may have another. `slots` to write to: in a rehearsal none are looked up."""
        before, after = _operators(self.cache.keys.device)
        state, sampling, page_size = State(*self._state[:, : kind.size]), self.rows.sampling, self.cache.page_size
        places = before(state, self.rows.table, sampling.ints, sampling.floats, page_size, self._idle_slot)
        slots = places.slots if slots is None else slots
        shared = Shared(*self._shared[:, : kind.size]) if kind.sharing else None
        work = None if kind.sharing else deal(places.start + 1, self.cache, self._num_queries)
        segment = Segment(slice(0, kind.size), places.pages, places.start, shared=shared, work=work)
        logits = self._forward(state.tokens, state.positions, slots, segment)
        batch = SamplingBatch.of(
            places.floats, places.ints, places.drawn, any_greedy=True, any_truncated=kind.truncated
        )
        after(state, *sample(logits, batch), self._ends, self._tokens, self._logp)

    def _forward(self, tokens: Tensor, positions: Tensor, slots: Tensor, segment: Segment) -> Tensor:
        recording = Recording(self.routes, slots) if self.routes is not None else None
        step = PagedStep(cache=self.cache, slots=slots, segments=[segment], routing=recording)
        logits = self.module(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, lockstep=step
        ).logits[0]
        if recording is not None:
            recording.write()
        return logits


def _operators(device: torch.device) -> tuple[Callable[..., Places], Callable[..., None]]:
    if not kernels.available(device):
        return look_up, move_on
    from lockstep.rollout import burst_kernels

    return burst_kernels.look_up, burst_kernels.move_on


def batch_sizes(largest: int) -> list[int]:
    """4, 8, then steps of at most a half and, where rows cost more than launches, a quarter: few to capture, little
    padding. (With fewer than four, rows of tables begin at odd places, for which kernels would be compiled again.)"""
    sizes = [4]
    for power in range(3, 20):
        parts = 2 if 2**power < 128 else 4
        sizes += [2**power + part * 2**power // parts for part in range(parts)]
    return [size for size in sizes if size < largest] + [largest]
