"""Which requests start first."""

from __future__ import annotations

from engine_support import ask, engine_core, finish, prompt, small
from lockstep.rollout.lengths import Lengths


def test_a_prompt_whose_answers_were_long_is_expected_to_be_long() -> None:
    lengths = Lengths()
    long, short, new = (ask(name, prompt(5, seed), 100) for seed, name in enumerate(("long", "short", "new")))
    assert lengths.expected(new) == 0
    for _ in range(20):
        lengths.saw(long, 90)
        lengths.saw(short, 10)
    assert 89 < lengths.expected(long) <= 90
    assert lengths.expected(short) == 10
    assert 10 < lengths.expected(new) < 90
    assert lengths.expected(ask("cut", prompt(5, 0), 20)) == 20


def test_longest_expected_start_first_and_siblings_stay_together() -> None:
    core = engine_core(small(), max_seqs=2)
    core.lengths = Lengths()
    finish(core, [ask("b", prompt(9, 2), 30), ask("a", prompt(9, 1), 3)])
    core.add([ask(f"{name}{i}", prompt(9, seed), 30 - 25 * i) for i in range(2) for name, seed in (("a", 1), ("b", 2))])
    core.add([ask("c", prompt(9, 2), 30)])
    assert [seq.request.uid for seq in core.scheduler.waiting] == ["b0", "b1", "a0", "a1", "c"]
