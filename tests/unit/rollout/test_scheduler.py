"""Pages and scheduling under random load, with a model that is only arithmetic on the token history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_support import ask
from lockstep.rollout.pages import PagePool
from lockstep.rollout.scheduler import Draws, Plan, Scheduler
from lockstep.rollout.sequence import Sequence
from lockstep.types import StopReason

PAGE = 4


@dataclass
class Shadow:
    """Checks every step against what the pages really hold: which (version, tokens up to here) wrote each slot."""

    scheduler: Scheduler
    slots: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    finished: list[Sequence] = field(default_factory=list)
    computed: int = 0
    ahead: tuple[Plan, list[Draws]] | None = None  # launched, not committed
    followed: int = 0

    def step(self) -> None:
        if self.ahead is None:
            plan = self.scheduler.schedule()
            self._check_plan(plan)
            self.ahead = self._launch(plan)
        (plan, drawn), self.ahead = self.ahead, None
        following = self.scheduler.follow(plan)
        if following is not None:
            self._check_room(following)
            draws = [] if plan.prefill else drawn
            self.ahead = self._launch(following, {id(c.seq): d[0] for c, d in zip(plan.decode, draws, strict=True)})
            self.followed += 1
        self.finished += self.scheduler.commit(plan, drawn, _take)
        self.check()

    @property
    def busy(self) -> bool:
        return self.ahead is not None or not self.scheduler.idle

    def _launch(self, plan: Plan, unknown: Mapping[int, list[int]] | None = None) -> tuple[Plan, list[Draws]]:
        """`unknown` are tokens the device has drawn and the scheduler does not know of yet."""
        drawn: list[Draws] = []
        for chunk in plan.chunks:
            tokens = chunk.seq.tokens + (unknown or {}).get(id(chunk.seq), [])
            goes_on = plan.follows and not plan.prefill  # from what only the device knows
            if not goes_on:
                self._write(chunk.seq, tokens, chunk.start, chunk.end)
                self.computed += chunk.end - chunk.start
            if goes_on and chunk.seq.row < 0:  # the device is told before it goes on
                drawn.append(([], []))
            elif goes_on or chunk.samples:
                drawn.append(self._draw(chunk.seq, tokens, plan.steps, wrote=not goes_on))
        return plan, drawn

    def _draw(self, seq: Sequence, known: list[int], steps: int, *, wrote: bool) -> Draws:
        """As the device does: token after token, until the sequence has all it may have."""
        tokens = list(known)
        while len(tokens) < min(len(known) + steps, seq.limit):
            if len(tokens) > len(known) or not wrote:
                self._write(seq, tokens, len(tokens) - 1, len(tokens))
                self.computed += 1
            tokens.append(sum(tokens) % 7)
        new = tokens[len(known) :]
        return new, [0.0] * len(new)

    def run(self, limit: int = 3000) -> None:
        while self.busy:
            self.step()
            limit -= 1
            assert limit, "the scheduler makes no progress"

    def _check_plan(self, plan: Plan) -> None:
        chunks = plan.chunks
        self._check_room(plan)
        assert all(c.end == c.start + 1 == len(c.seq.tokens) for c in plan.decode)
        oldest = min(self.scheduler.running, key=lambda s: s.arrival)
        assert any(c.seq is oldest for c in chunks), "the oldest is always served"

    def _check_room(self, plan: Plan) -> None:
        chunks = plan.chunks
        assert chunks, "an empty step although there is work"
        assert len({id(c.seq) for c in chunks}) == len(chunks), "a sequence twice in one step"
        assert sum(c.end - c.start for c in chunks) <= self.scheduler.max_step_tokens

    def _write(self, seq: Sequence, tokens: list[int], start: int, end: int) -> None:
        for position in range(start, end):
            slot = (seq.pages[position // PAGE], position % PAGE)
            self.slots[slot] = (self.scheduler.version, tuple(tokens[: position + 1]))

    def check(self) -> None:
        pool, scheduler = self.scheduler.pool, self.scheduler
        users = [0] * pool.num_pages
        for seq in scheduler.running:
            assert len(seq.pages) == len(set(seq.pages))
            for page in seq.pages:
                users[page] += 1
            for position in range(seq.num_computed):  # every key is this sequence's own, or an equal prefix
                version, tokens = self.slots[seq.pages[position // PAGE], position % PAGE]
                assert tokens == tuple(seq.tokens[: position + 1])
                assert seq.node is None or version == scheduler.version, "a shared page of another version"
        assert users == pool._users, "a page is leaked or freed too early"
        assert sorted(pool._free) == [p for p in range(pool.num_pages) if not users[p] and p not in pool._node_of_page]
        assert set(pool._unused) == {p for p in pool._node_of_page if not users[p]}
        for node in pool._nodes.values():
            version, tokens = self.slots[node.page, PAGE - 1]
            assert version == scheduler.version, "the cache holds a page of another version"
            assert tokens[-PAGE:] == node.key[1]
        for queue in (scheduler.running, scheduler.waiting):
            assert [s.arrival for s in queue] == sorted(s.arrival for s in queue)
        rows = [s.row for s in scheduler.running]
        assert sorted(rows + scheduler._rows) == list(range(scheduler.max_seqs))


def _take(seq: Sequence, drawn: Draws) -> int:
    seq.tokens += drawn[0]
    seq.logp += drawn[1]
    if len(seq.logp) >= seq.request.params.max_tokens:
        seq.stop_reason = StopReason.LENGTH
    return len(drawn[0])


def make(num_pages: int = 64, max_seqs: int = 8, step_tokens: int = 64, run_ahead: int = 1) -> Shadow:
    pool = PagePool(num_pages, PAGE)
    return Shadow(Scheduler(pool, max_seqs, step_tokens, run_ahead, follow_from=1, idle_share=1.0))


def sequences(*specs: tuple[list[int], int], first: int = 0) -> list[Sequence]:
    return [Sequence.of(ask(f"{i}", t, n), i, context=1000) for i, (t, n) in enumerate(specs, start=first)]


LOAD = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=20),  # two letters: many equal prefixes
        st.integers(1, 12),  # tokens to sample
        st.sampled_from(["", "", "", "abort", "new", "new_recompute", "forget"]),  # what happens after it was added
        st.integers(0, 4),  # steps before the next
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(
    load=LOAD,
    num_pages=st.integers(8, 24),
    max_seqs=st.integers(1, 5),
    step_tokens=st.integers(5, 24),
    run_ahead=st.integers(1, 9),
)
def test_random_load(
    load: list[tuple[list[int], int, str, int]], num_pages: int, max_seqs: int, step_tokens: int, run_ahead: int
) -> None:
    """Nothing leaks, nothing is shared wrongly, everything ends, whatever comes."""
    shadow = make(num_pages, max_seqs, step_tokens, run_ahead)
    scheduler, aborted = shadow.scheduler, []
    for arrival, (tokens, max_tokens, event, steps) in enumerate(load):
        scheduler.add(sequences((tokens, max_tokens), first=arrival))
        if event == "abort":
            aborted += scheduler.abort({str(arrival // 2), "unknown"})
        elif event.startswith("new"):
            scheduler.new_version(scheduler.version + 1, recompute=event == "new_recompute")
        elif event == "forget":
            scheduler.forget_prefixes()
        shadow.check()
        for _ in range(steps):
            if shadow.busy:
                shadow.step()
    shadow.run()
    ended = sorted(int(s.request.uid) for s in (*shadow.finished, *aborted))
    assert ended == list(range(len(load)))
    assert all(len(s.versions) == len(s.logp) == len(s.tokens) - s.num_prompt for s in shadow.finished)
    assert all(s.versions == sorted(s.versions) for s in shadow.finished)
    assert all(len(s.logp) == s.request.params.max_tokens for s in shadow.finished)
    assert scheduler.pool.num_available == num_pages


def test_a_burst_follows_another_before_that_ones_end_is_known() -> None:
    shadow = make(run_ahead=4)
    shadow.scheduler.add(sequences(([1, 2, 3], 30), ([4, 5], 9)))
    shadow.run()
    assert shadow.followed
    assert [len(s.logp) for s in shadow.finished] == [9, 30]
    assert shadow.scheduler.pool.num_available == 64


def test_prompts_for_which_a_step_has_no_room_follow_it() -> None:
    shadow = make(step_tokens=8, run_ahead=4)
    scheduler = shadow.scheduler
    scheduler.add(sequences(*[([i] * 6, 3) for i in range(4)]))
    plans = [scheduler.schedule()]
    while (following := scheduler.follow(plans[-1])) is not None:
        plans.append(following)
    chunks = [[(c.seq.arrival, c.start, c.end) for c in plan.prefill] for plan in plans]
    assert chunks == [[(0, 0, 6), (1, 0, 2)], [(1, 2, 6), (2, 0, 4)], [(2, 4, 6), (3, 0, 6)]]
    assert not any(plan.decode for plan in plans)


def test_nobody_waits_for_more_prompts_once_answers_go_on() -> None:
    shadow = make(step_tokens=8, run_ahead=4)
    shadow.scheduler.add(sequences(([1] * 6, 30)))
    shadow.step()
    shadow.scheduler.add(sequences(*[([i] * 6, 3) for i in range(2, 5)], first=1))
    plan = shadow.scheduler.schedule()
    assert len(plan.decode) == 1
    assert plan.prefill
    assert shadow.scheduler.follow(plan) is None


def test_many_short_requests_do_not_keep_the_oldest_from_going_on() -> None:
    """Their answers end with the first token, so that rows are always free for further prompts."""
    shadow = make(step_tokens=16, run_ahead=8)
    oldest, *others = sequences(([1] * 6, 30), *[([i, 0, 0, 0, 0, 0], 1) for i in range(2, 102)])
    shadow.scheduler.add([oldest, *others])
    for _ in range(8):
        shadow.step()
    assert len(oldest.logp) > 1


@pytest.mark.parametrize("run_ahead", [1, 4])
def test_a_group_computes_its_prompt_once(run_ahead: int) -> None:
    """Eight answers to a prompt of 21 tokens: five full pages once, and the rest of each on its own."""
    shadow = make(run_ahead=run_ahead)
    shadow.scheduler.add(sequences(*[([*range(21)], 2)] * 8))
    shadow.run()
    counters = shadow.scheduler.counters
    assert counters.prompt_tokens == 8 * 21
    assert counters.prefix_hit_tokens == 7 * 20
    assert shadow.computed == 20 + 8 * (1 + 1)


@pytest.mark.parametrize("run_ahead", [1, 4])
def test_siblings_wait_for_a_prompt_that_is_prefilled_in_chunks(run_ahead: int) -> None:
    shadow = make(step_tokens=8, run_ahead=run_ahead)
    shadow.scheduler.add(sequences(*[([*range(29)], 1)] * 4))
    shadow.run()
    assert shadow.computed == 28 + 4


def test_the_cache_survives_its_owner_until_pages_are_needed() -> None:
    shadow = make(num_pages=8)
    scheduler = shadow.scheduler
    scheduler.add(sequences(([*range(13)], 1)))
    shadow.run()
    scheduler.add(sequences(([*range(13), 99], 1), first=1))
    shadow.run()
    assert scheduler.counters.prefix_hit_tokens == 12
    scheduler.add(sequences(([*range(50, 80)], 1), first=2))  # needs all eight pages
    shadow.run()
    scheduler.add(sequences(([*range(13)], 1), first=3))
    shadow.run()
    assert scheduler.counters.prefix_hit_tokens == 12


@pytest.mark.parametrize("recompute", [False, True])
def test_new_weights_void_the_cache(recompute: bool) -> None:
    shadow = make()
    scheduler = shadow.scheduler
    scheduler.add(sequences(([*range(13)], 6)))
    shadow.step()
    scheduler.new_version(1, recompute=recompute)
    scheduler.add(sequences(([*range(13)], 6), first=1))
    shadow.run()
    hits = scheduler.counters.prefix_hit_tokens
    assert hits == (12 if recompute else 0)  # recomputed under the new weights it may be shared; mixed it may not
    assert [s.versions for s in shadow.finished] == [[0] + [1] * 5, [1] * 6]


def test_one_without_pages_gives_way_to_the_older() -> None:
    shadow = make(num_pages=8)
    shadow.scheduler.add(sequences(([1] * 8, 20), ([2] * 8, 20)))
    shadow.run()
    assert [s.arrival for s in shadow.finished] == [0, 1]
    assert shadow.scheduler.counters.preemptions >= 1


@pytest.mark.parametrize(("num_pages", "steps"), [(8, 8), (5, 4), (4, 4), (3, 2), (2, 2)])
def test_few_pages_make_for_short_bursts(num_pages: int, steps: int) -> None:
    """Two sequences in their second step: as many steps as there are pages for, without taking any from the other."""
    shadow = make(num_pages=num_pages, run_ahead=8)
    shadow.scheduler.add(sequences(([1] * 2, 12), ([2] * 2, 12)))
    shadow.step()
    plan = shadow.scheduler.schedule()
    assert plan.steps == steps
    assert shadow.scheduler.counters.preemptions == 0


def test_older_requests_start_first() -> None:
    shadow = make(max_seqs=2)
    shadow.scheduler.add(sequences(*[([i] * 5, 3) for i in range(6)]))
    shadow.run()
    assert [s.arrival for s in shadow.finished] == [0, 1, 2, 3, 4, 5]


def test_a_page_is_never_released_twice() -> None:
    pool = PagePool(2, PAGE)
    page = pool.take()
    assert page is not None
    pool.release([page])
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([page])
