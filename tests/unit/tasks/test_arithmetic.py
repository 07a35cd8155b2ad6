import re
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config import ConfigError, Plugin
from lockstep.tasks._lazy import split_of
from lockstep.tasks.arithmetic import Arithmetic

KNOBS = st.builds(
    Arithmetic,
    max_terms=st.integers(2, 8),
    max_value=st.integers(5, 99),
    operations=st.sampled_from(["+", "-", "+-"]),
    modulus=st.sampled_from([None, 10, 97]),
    demo_max_terms=st.integers(2, 4),
    demo_steps=st.sampled_from([0.0, 0.3, 1.0]),
    format_weight=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**32),
)


def prompts(task: Arithmetic, split: str, count: int) -> set[str]:
    samples = task.demonstrations() if split == "demonstrations" else task.samples(split)
    return {sample.messages[0].content for sample in islice(samples, count)}


@given(KNOBS, st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_splits_are_disjoint_even_across_seeds(task: Arithmetic, other_seed: int) -> None:
    other = replace(task, seed=other_seed)
    splits = ("train", "eval", "demonstrations")
    seen = [prompts(task, split, 60) | prompts(other, split, 60) for split in splits]
    assert sum(map(len, seen)) == len(set().union(*seen))


@given(KNOBS, st.integers(0, 1000))
@settings(deadline=None)
def test_the_worked_solution_is_right(task: Arithmetic, index: int) -> None:
    for sample in (task.samples("train")[index], task.demonstrations()[index]):
        assert sample.solution is not None
        problem = sample.messages[0].content.rstrip("=")
        value = eval(re.sub(r"\b0+(?=\d)", "", problem))
        assert int(sample.answer) == (value if task.modulus is None else value % task.modulus)
        assert task.reward(sample, sample.solution).value == pytest.approx(1.0 + task.format_weight)


def test_what_problems_and_solutions_look_like() -> None:
    task = Arithmetic(operations="+-", seed=1)
    sample = next(s for s in task.demonstrations() if s.info["terms"] == 3)
    assert (sample.messages[0].content, sample.solution, sample.answer) == ("4+4-9=", "4+4=8;8-9=-1;#-1", "-1")


def test_knobs_bound_the_problems() -> None:
    task = Arithmetic(min_terms=3, max_terms=4, max_value=5, modulus=10, demo_max_terms=2)
    for sample in islice(task.samples("train"), 200):
        terms = [int(t) for t in re.findall(r"\d+", sample.messages[0].content)]
        assert len(terms) in (3, 4)
        assert max(terms) <= 5
        assert 0 <= int(sample.answer) < 10
    assert {sample.info["terms"] for sample in islice(task.demonstrations(), 200)} == {2}


def test_demonstrations_subtract_less_often_than_problems() -> None:
    task = Arithmetic(min_terms=5, operations="+-", min_minus=3, demo_max_terms=5, demo_max_minus=2)
    problems = (sample.messages[0].content for sample in islice(task.samples("train"), 200))
    demonstrations = (sample.messages[0].content for sample in islice(task.demonstrations(), 200))
    assert {text.count("-") for text in problems} == {3, 4}
    assert {text.count("-") for text in demonstrations} == {0, 1, 2}


def test_only_some_demonstrations_show_their_steps() -> None:
    task = Arithmetic(demo_steps=0.3)
    solutions = [sample.solution or "" for sample in islice(task.demonstrations(), 1000)]
    assert 0.25 < sum("=" in solution for solution in solutions) / 1000 < 0.35
    assert all(re.fullmatch(r"([^;]+;)*#\d+", solution) for solution in solutions)


def test_samples_depend_on_seed_and_place_alone() -> None:
    assert Arithmetic(seed=5).samples("train")[99] == Arithmetic(seed=5, num_train=200).samples("train")[99]
    assert Arithmetic(seed=5).samples("train")[:20] != Arithmetic(seed=6).samples("train")[:20]
    samples = Arithmetic(num_eval=10).samples("eval")
    assert (len(samples), len(list(samples)), samples[-1]) == (10, 10, samples[9])
    with pytest.raises(IndexError):
        samples[10]


def test_reasons() -> None:
    task = Arithmetic(format_weight=0.1)
    sample = replace(task.samples("train")[0], answer="42")
    for answer, value, reasons in (
        ("40+2=42;#42", 1.1, ("correct: 42 is 42", "format: steps, then one answer")),
        ("41;#41", 0.1, ("correct: 41 is not 42", "format: steps, then one answer")),
        ("#1;#42", 1.0, ("correct: 42 is 42", "format: not of the form 1+2=3;#3")),
        ("42", 0.0, ("correct: no # before a final answer", "format: not of the form 1+2=3;#3")),
        ("40+2=42;#", 0.0, ("correct: nothing is not 42", "format: not of the form 1+2=3;#3")),
    ):
        verdict = task.reward(sample, answer)
        assert verdict.value == pytest.approx(value)
        assert verdict.reasons == reasons


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"min_terms": 5, "max_terms": 4}, "min_terms is 5, max_terms 4"),
        ({"demo_max_terms": 1}, "demo_max_terms is 1"),
        ({"demo_max_minus": -1}, "demo_max_minus is -1"),
        ({"operations": "-", "demo_max_minus": 1}, r"demo_max_minus is 1.*\+ among operations"),
        ({"demo_steps": 1.5}, "demo_steps is 1.5"),
        ({"min_minus": 1}, "min_minus is 1: must be 0 to 0"),
        ({"min_minus": 2, "operations": "+-"}, "min_minus is 2: must be 0 to 1"),
        ({"operations": "*"}, r"operations is '\*'; choices"),
        ({"modulus": 1}, "modulus is 1"),
    ],
)
def test_bad_knobs(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Plugin(package="lockstep.tasks", name="arithmetic", options=options).build()


def test_too_few_problems() -> None:
    """0+0 is the only problem, and it belongs to one split alone."""
    task = Arithmetic(max_terms=2, max_value=0, demo_max_terms=2)
    splits = (task.samples("train"), task.samples("eval"), task.demonstrations())
    for split, samples in zip(("train", "eval", "demonstrations"), splits, strict=True):
        if split_of("0+0") == split:
            assert samples[0].messages[0].content == "0+0="
        else:
            with pytest.raises(ConfigError, match=f"no problem for split '{split}'.*too few"):
                samples[0]
