"""How an answer ends: end tokens, stop strings of any bytes, limits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from transformers import PreTrainedModel

from engine_support import ask, engine_core, finish, prompt
from lockstep.rollout.scheduler import Draws, Plan
from lockstep.types import Completion, Request, StopReason


def answers(module: PreTrainedModel, request: Request, end: Sequence[int] = ()) -> Completion:
    return finish(engine_core(module, end=end), [request])[request.uid]


def test_ends_of_an_answer(dense: PreTrainedModel) -> None:
    free = answers(dense, ask("r", prompt(5, seed=1), 30)).tokens
    token = next(t for i, t in enumerate(free) if i > 2 and t not in free[:i])
    cut = free[: free.index(token) + 1]
    ended = answers(dense, ask("r", prompt(5, seed=1), 30), end=(token,))
    assert (ended.tokens, ended.stop_reason) == (cut, StopReason.EOS)
    stopped = answers(dense, ask("r", prompt(5, seed=1), 30, stop_tokens=(token,)))
    assert (stopped.tokens, stopped.stop_reason) == (cut, StopReason.EOS)
    short = answers(dense, ask("r", prompt(5, seed=1), 3))
    assert (short.tokens, short.stop_reason) == (free[:3], StopReason.LENGTH)
    full = answers(dense, ask("r", prompt(125, seed=1), 30))
    assert (len(full.tokens), full.stop_reason) == (3, StopReason.LENGTH)


@pytest.mark.parametrize(
    ("text", "stop", "end"),
    [
        ("one two three four", ("two",), "one two"),
        ("one two three four", ("e t", "xyz"), "one t"),
        ("sum: ½ + ½ → 1 ok", ("→",), "sum: ½ + ½ →"),  # three bytes, three tokens
        ("hello 👩‍🔬 bye", ("👩‍🔬",), "hello 👩‍🔬"),  # three characters of eleven bytes
        ("x" * 60 + "\n\nEND", ("\n\n",), "x" * 60 + "\n\n"),
        ("a<|user|>b", ("<|user|>",), "a<|user|>"),
        ("nothing here", ("?",), None),
    ],
)
@pytest.mark.parametrize("run_ahead", [1, 7])
def test_stop_strings(
    dense: PreTrainedModel, text: str, stop: tuple[str, ...], end: str | None, run_ahead: int
) -> None:
    """A model that says `text`, byte by byte."""
    core = engine_core(dense)
    script = core.tokenizer.encode(text)
    launched: list[Plan] = []
    core.runner.launch = launched.append  # type: ignore[method-assign]
    core.runner.collect = lambda: _scripted(script, run_ahead, launched.pop())  # type: ignore[method-assign]
    completion = finish(core, [ask("r", (1, 2), len(script), stop=stop)])["r"]
    assert core.tokenizer.decode(completion.tokens) == (end or text)
    assert completion.stop_reason is (StopReason.STOP if end else StopReason.LENGTH)


def _scripted(script: Sequence[int], run_ahead: int, plan: Plan) -> list[Draws]:
    """What a burst of `run_ahead` steps hands over: more than may be kept."""
    spans = [script[len(c.seq.logp) :][:run_ahead] for c in plan.chunks if c.samples]
    return [(list(span), [0.0] * len(span)) for span in spans]
