"""Which tokens run next: continuous batching over pages, with chunked prefill, prefix sharing and preemption.

Pure bookkeeping, no tensors: `schedule` picks chunks, the runner computes them, `commit` takes the sampled tokens in.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from lockstep.rollout.pages import PagePool
from lockstep.rollout.sequence import Sequence
from lockstep.types import StopReason

Draws: TypeAlias = tuple[list[int], list[float]]
"""Tokens drawn for one sequence and their log-probs, in order."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of a sequence, to be computed in this step."""

    seq: Sequence
    start: int
    end: int

    @property
    def samples(self) -> bool:
        """The last token's logits are needed: everything before the next token is computed."""
        return self.end == len(self.seq.tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    decode: list[Chunk]  # one token each
    prefill: list[Chunk]
    version: int  # of the weights that compute it
    steps: int = 1  # decode steps in a row, where there is nothing to prefill
    follows: bool = False  # another, whose results were not known when this was made

    @property
    def chunks(self) -> list[Chunk]:
        return self.decode + self.prefill


@dataclass(slots=True)
class Counters:
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    steps: int = 0


@dataclass(slots=True)
class Scheduler:
    pool: PagePool
    max_seqs: int
    max_step_tokens: int
    run_ahead: int = 1  # decode steps that are computed without asking, at most
    follow_from: int = 16  # running sequences: fewer may all end in a burst, and the next would be for nothing
    idle_share: float = 0.1  # of a burst's rows, at most, if another is to follow
    version: int = 0
    admitting: bool = True  # False while draining for a weight update
    waiting: deque[Sequence] = field(default_factory=deque)  # oldest first
    running: list[Sequence] = field(default_factory=list)  # oldest first
    counters: Counters = field(default_factory=Counters)
    leaving: Callable[[Sequence], None] | None = None  # told of a running sequence before it gives up its pages
    _rows: list[int] = field(default_factory=list)
    _seatings: int = 0
    _seated_before: int = 0  # the last plan that follows no other

    def __post_init__(self) -> None:
        self._rows = list(range(self.max_seqs))

    @property
    def idle(self) -> bool:
        return not self.running and not (self.waiting and self.admitting)

    def add(self, seqs: Iterable[Sequence]) -> None:
        self.waiting.extend(seqs)

    def schedule(self) -> Plan:
        """The next step. Never empty unless idle: the oldest sequence always fits, by the engine's admission check."""
        preemptions, self._seated_before = self.counters.preemptions, self._seatings
        decode = self._schedule_decode()
        prefill = self._continue_prefill(self.max_step_tokens - len(decode))
        if preemptions == self.counters.preemptions:  # who just lost its pages is not let in again at once
            prefill += self._admit(self.max_step_tokens - len(decode) - sum(c.end - c.start for c in prefill), prefill)
        decode, prefill = ([c for c in chunks if c.seq.row >= 0] for chunks in (decode, prefill))
        steps = 1 if prefill else self._run_ahead([c.seq for c in decode])
        self.counters.steps += steps
        return Plan(decode, prefill, version=self.version, steps=steps)

    def _run_ahead(self, seqs: Collection[Sequence]) -> int:
        """Decode steps that can be computed in a row: pages for them are there, without taking any from another.

        Fewer while others wait: a row that ends in between is empty until the next look.
        """
        if self.run_ahead == 1:
            return 1
        longest = max((seq.limit - len(seq.tokens) for seq in seqs), default=1)
        steps = max(1, min(self.run_ahead // 4 if self.waiting else self.run_ahead, longest))
        while steps > 1 and self._pages_ahead(seqs, steps) > self.pool.num_available:
            steps //= 2
        for seq in seqs:
            self._grow(seq, _end_after(seq, steps))
        return steps

    def follow(self, plan: Plan) -> Plan | None:
        """What is computed after `plan`, before it is known what that draws; None if it is better to wait."""
        if self.run_ahead == 1:
            return None
        return self._follow_prefill(plan) if plan.prefill else self._follow_burst(plan)

    def _follow_prefill(self, plan: Plan) -> Plan | None:
        """Prompts for which the step had no room. Rows fill up first, once; then all of them decode together."""
        if plan.decode or any(chunk.seq.row < 0 for chunk in plan.prefill):
            return None
        all_seated = self._seatings - self._seated_before >= self.max_seqs
        if all_seated or self._pages_ahead(self.running, 2) > self.pool.num_available:
            return None
        for seq in self.running:  # nobody new gets the pages that they need next
            self._grow(seq, _end_after(seq, 2))
        budget = self.max_step_tokens
        unfinished = [c for c in plan.prefill if not c.samples]  # one at most, who had the last of the step's tokens
        chunks = [Chunk(c.seq, c.end, min(len(c.seq.tokens), c.end + budget)) for c in unfinished]
        chunks += self._admit(budget - sum(c.end - c.start for c in chunks), plan.prefill)
        if not chunks:
            return None
        self.counters.steps += 1
        return Plan([], chunks, version=self.version, follows=True)

    def _follow_burst(self, plan: Plan) -> Plan | None:
        """The same sequences further on; not where all may end soon, some have ended already, or others wait."""
        if plan.steps < self.run_ahead or self.waiting:
            return None
        running = [chunk.seq for chunk in plan.decode if chunk.seq.row >= 0]
        longest = max((seq.limit - len(seq.tokens) - plan.steps for seq in running), default=0)
        steps = min(self.run_ahead, longest)
        few = len(running) < max(self.follow_from, (1 - self.idle_share) * len(plan.decode))
        if few or steps < 1 or self._pages_ahead(running, plan.steps + steps) > self.pool.num_available:
            return None
        for seq in running:
            self._grow(seq, _end_after(seq, plan.steps + steps))
        self.counters.steps += steps
        chunks = [Chunk(c.seq, c.start + plan.steps, c.end + plan.steps) for c in plan.decode]
        return Plan(chunks, [], version=self.version, steps=steps, follows=True)

    def _pages_ahead(self, seqs: Collection[Sequence], steps: int) -> int:
        """Pages that so many decode steps of these would take."""
        return sum(max(0, self._pages_needed(seq, _end_after(seq, steps))) for seq in seqs)

    def commit(self, plan: Plan, drawn: Iterable[Draws], taken: Callable[[Sequence, Draws], int]) -> list[Sequence]:
        """Takes in what was sampled, for every sampling chunk in plan order; returns the sequences that ended.

        `taken` appends to a sequence what it accepts, says how many that were, and ends it where it must.
        """
        finished, drawn = [], iter(drawn)
        for chunk in plan.chunks:
            seq, num_taken = chunk.seq, 1
            draws = next(drawn) if chunk.samples or not plan.prefill else None
            if plan.follows and seq.row < 0:  # ended, or was aborted, after the plan was made
                continue
            assert chunk.samples or plan.prefill, "who goes on has drawn all that the burst before could draw"
            if draws is not None:
                num_taken = taken(seq, draws)
                seq.versions += [plan.version] * num_taken
                self.counters.sampled_tokens += num_taken
            end = chunk.end + num_taken - 1
            seq.num_computed = end
            seq.computed_by += [plan.version] * (end - chunk.start)
            self._cache_full_pages(seq)
            if seq.stop_reason is not None:
                finished.append(seq)
        for seq in finished:
            self._leave(seq)
        return finished

    def abort(self, uids: set[str]) -> list[Sequence]:
        """Ends requests between two steps; they keep what they have."""
        ended = [s for s in (*self.running, *self.waiting) if s.request.uid in uids]
        for seq in ended:
            seq.stop_reason = StopReason.ABORTED
            if seq.row >= 0:
                self._leave(seq)
            else:
                self.waiting.remove(seq)
        return ended

    def new_version(self, version: int, *, recompute: bool) -> None:
        """New weights: cached prefixes are void. Running sequences keep their pages or give them up and start over."""
        self.version = version
        self.empty() if recompute else self.forget_prefixes()

    def empty(self) -> None:
        """Everyone who runs gives up its pages and is to start over; nothing is left in the prefix cache."""
        for seq in list(self.running):
            self._send_back(seq)
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """Empties the prefix cache. What runs goes on, but never shares its pages: they may mix versions by then."""
        self.pool.reset()
        for seq in self.running:
            seq.node = None

    def _schedule_decode(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        for seq in list(self.running):
            if seq.row < 0 or seq.num_computed < len(seq.tokens) - 1:
                continue  # preempted in this very loop, or still prefilling
            if self._grow(seq, len(seq.tokens)):
                chunks.append(Chunk(seq, seq.num_computed, len(seq.tokens)))
        return chunks

    def _continue_prefill(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        for seq in list(self.running):
            if seq.row >= 0 and seq.num_computed < len(seq.tokens) - 1 and budget > 0:
                end = min(len(seq.tokens), seq.num_computed + budget)
                if self._grow(seq, end):
                    chunks.append(Chunk(seq, seq.num_computed, end))
                    budget -= end - seq.num_computed
        return chunks

    def _admit(self, budget: int, prefilling: list[Chunk]) -> list[Chunk]:
        """Starts waiting sequences, oldest first, while rows, pages and the step's tokens allow."""
        chunks: list[Chunk] = []
        held: list[Sequence] = []
        being_computed = {self._next_page_key(chunk.seq) for chunk in prefilling} - {None}
        while self.waiting and self.admitting and self._rows and budget > 0:
            seq = self.waiting.popleft()
            self._find_prefix(seq)
            key = self._next_page_key(seq)
            end = min(len(seq.tokens), seq.num_computed + budget)
            if key in being_computed:
                held.append(seq)  # a sibling computes this page right now: share it in the next step
                self._release(seq)
                continue
            if self._pages_needed(seq, end) > self.pool.num_available:
                self._release(seq)
                self.waiting.appendleft(seq)
                break
            self._grow(seq, end)
            if key is not None:
                being_computed.add(key)
            self._start(seq)
            chunks.append(Chunk(seq, seq.num_computed, end))
            budget -= end - seq.num_computed
        self.waiting.extendleft(reversed(held))
        return chunks

    def _start(self, seq: Sequence) -> None:
        seq.row = heapq.heappop(self._rows)
        self._seatings += 1
        seq.seating = self._seatings
        insort(self.running, seq, key=lambda s: s.arrival)
        seq.computed_by = [self.version] * seq.num_computed  # cached prefixes are void with every new version
        self.counters.prompt_tokens += len(seq.tokens)
        self.counters.prefix_hit_tokens += seq.num_computed

    def _find_prefix(self, seq: Sequence) -> None:
        """Takes the longest cached prefix, leaving at least one token to compute."""
        seq.node, size = self.pool.root, self.pool.page_size
        while (end := seq.num_computed + size) < len(seq.tokens):
            node = self.pool.find(seq.node, seq.tokens[seq.num_computed : end])
            if node is None:
                return
            seq.pages.append(self.pool.share(node))
            seq.node, seq.num_computed = node.uid, end
            seq.num_cached_pages += 1

    def _next_page_key(self, seq: Sequence) -> tuple[int, tuple[int, ...]] | None:
        """What the next page to be cached will be found by; None if no other sequence could share it."""
        start = seq.num_cached_pages * self.pool.page_size
        end = start + self.pool.page_size
        if seq.node is None or end >= len(seq.tokens):
            return None
        return seq.node, tuple(seq.tokens[start:end])

    def _cache_full_pages(self, seq: Sequence) -> None:
        size = self.pool.page_size
        while seq.node is not None and (end := (seq.num_cached_pages + 1) * size) <= seq.num_computed:
            page = seq.pages[seq.num_cached_pages]
            seq.node = self.pool.cache(seq.node, seq.tokens[end - size : end], page).uid
            seq.num_cached_pages += 1

    def _pages_needed(self, seq: Sequence, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.page_size) - len(seq.pages)

    def _grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Pages for `num_tokens`, preempting the youngest if need be; False if that was `seq` itself."""
        while self._pages_needed(seq, num_tokens) > 0:
            page = self.pool.take()
            if page is not None:
                seq.pages.append(page)
                continue
            victim = self.running[-1]
            self._send_back(victim)
            self.counters.preemptions += 1
            if victim is seq:
                return False
        return True

    def _send_back(self, seq: Sequence) -> None:
        """Gives up its pages and waits for its turn, by age; its tokens are prefilled again."""
        self._leave(seq)
        insort(self.waiting, seq, key=lambda s: s.arrival)

    def _leave(self, seq: Sequence) -> None:
        if self.leaving is not None:
            self.leaving(seq)
        self.running.remove(seq)
        heapq.heappush(self._rows, seq.row)
        seq.row = -1
        self._release(seq)

    def _release(self, seq: Sequence) -> None:
        self.pool.release(seq.pages)
        seq.pages, seq.num_computed, seq.num_cached_pages, seq.node = [], 0, 0, None
        seq.computed_by = []


def _end_after(seq: Sequence, steps: int) -> int:
    """Tokens with keys and values once it has made so many decode steps, or has ended before."""
    return min(len(seq.tokens) - 1 + steps, seq.limit)
