"""Section 3 of R3 on any mixture: the engine samples and records, the learner scores the same tokens three times.

Once with its own choice of experts, once with the engine's, and once more with its own, packed in another order: what
is left between two forwards of one program is the floor that no replay gets below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.algorithms.diagnostics import Tally, metrics, tally_mismatch, tally_routing
from lockstep.assembly.export import encode_masters
from lockstep.assembly.governed import in_words as precision_words
from lockstep.assembly.recipe import Recipe
from lockstep.assembly.roles import Sampling, become_learner
from lockstep.config import ConfigError
from lockstep.data.chat import Conversation, render_prompt
from lockstep.data.packing import Row, collate, pack, row_of
from lockstep.learner.routes import RouteCheck
from lockstep.learner.scoring import score
from lockstep.models.loading import Loaded
from lockstep.models.routing import Routers, find_routers
from lockstep.report.route_study import Comparison, Floats, RouteStudy
from lockstep.types import Completion, Message, Request, Trajectory, Verdict

Progress = Callable[[str, int, int], None]  # what is being done, how much of it is, how much there is
Prompt = Sequence[Message]


@dataclass(frozen=True, slots=True)
class Forward:
    """All rows, scored once."""

    logp: list[Tensor]  # [T] of each
    routes: list[Tensor]  # [T, L, k] of each, the experts that ran
    metrics: dict[str, float]

    @property
    def rows(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.logp, self.routes, strict=True))


async def study(
    recipe: Recipe,
    loaded: Loaded,
    prompts: Sequence[Prompt],
    *,
    name: str,
    answers: int,
    tell: Progress,
    checkpoint: str | None = None,
) -> RouteStudy:
    """Of the model called `name`, so many `answers` to each prompt. The loaded module becomes the learner's; a low-bit
    engine runs the codes of the `checkpoint` it came from. ConfigError for a dense model and for one whose routers
    cannot be followed.

    consumes: prompts · waits for: the engine · then scores, blocking the event loop
    """
    routers = _routers(loaded)
    roles = Sampling(recipe, loaded, routers=routers)
    if roles.low_bit is not None and checkpoint is not None:
        codes = encode_masters(Path(checkpoint), loaded, roles.low_bit.format, roles.low_bit.layers)
        roles.low_bit.take(codes)
    try:
        found = await _sample(roles, prompts, answers, tell)
    finally:
        await roles.close()
    become_learner(recipe, loaded, roles.low_bit, routers)
    RouteCheck(routers)(found)
    rows = [row_of(answer, 0) for answer in found if answer.mask.any()]
    result = _compare(name, recipe, loaded, routers, rows, tell)
    if left_out := len(prompts) - len(found) // answers:
        return replace(result, facts={**result.facts, "prompts left out, longer than the context": str(left_out)})
    return result


def _routers(loaded: Loaded) -> Routers:
    try:
        routers = find_routers(loaded.module)
    except ConfigError as refused:
        advice = 'nothing of it can be analysed here; to train it, set learner.routing = "off" in its recipe'
        raise ConfigError(f"{refused}; {advice}") from None
    if routers is None:
        raise ConfigError(f"{type(loaded.module).__name__} is dense: it has no routers to look at")
    return routers


async def _sample(roles: Sampling, prompts: Sequence[Prompt], answers: int, tell: Progress) -> list[Trajectory]:
    requests = [_request(roles, prompt, f"{i}/{n}", n) for i, prompt in enumerate(prompts) for n in range(answers)]
    fitting = {r.uid: r for r in requests if len(r.tokens) < roles.loaded.context}
    if not fitting:
        raise ConfigError(f"none of {len(prompts)} prompts fits the model's context of {roles.loaded.context} tokens")
    done: dict[str, Completion] = {}
    async for completion in roles.engine.generate(list(fitting.values())):
        done[completion.uid] = completion
        tell("sampling", len(done), len(fitting))
    return [_trajectory(request, done[uid]) for uid, request in fitting.items()]


def _request(roles: Sampling, prompt: Prompt, uid: str, seed: int) -> Request:
    tokens = tuple(render_prompt(roles.loaded.tokenizer, prompt))
    return Request(uid=uid, tokens=tokens, params=roles.recipe.rollout.params(roles.recipe.seed + seed))


def _trajectory(request: Request, completion: Completion) -> Trajectory:
    conversation = Conversation()
    conversation.observe(request.tokens)
    conversation.sampled(completion)
    return conversation.trajectory(
        uid=request.uid, text="", verdict=Verdict(value=None), temperature=request.params.temperature
    )


def _compare(
    name: str, recipe: Recipe, loaded: Loaded, routers: Routers, rows: list[Row], tell: Progress
) -> RouteStudy:
    def forward(what: str, rows: Sequence[Row]) -> Forward:
        return score_all(loaded, routers, rows, recipe.learner.micro_tokens, lambda num: tell(what, num, len(rows)))

    live = forward("scoring, own experts", [replace(row, replayed=False) for row in rows])
    replayed = forward("scoring, replayed", rows)
    again = forward(
        "scoring, once more", [_as_scored(row, *one) for row, one in zip(rows, live.rows, strict=True)][::-1]
    )
    engine, first, second, told = (
        _probabilities(rows, logp)
        for logp in ([row.logp_behav for row in rows], live.logp, again.logp[::-1], replayed.logp)
    )
    return RouteStudy(
        model=name,
        facts=_facts(recipe, loaded, routers, rows),
        num_experts=routers.num_experts,
        top_k=routers.top_k,
        live=_comparison("live", "sampler and learner", ("sampler", "learner"), engine, first, live),
        replayed=_comparison("replayed", "with replay", ("sampler", "learner"), engine, told, replayed),
        repeated=_comparison("repeated", "learner, twice", ("first", "second"), first, second, again),
        differing=[_differing(row, ids) for row, ids in zip(rows, live.routes, strict=True)],
    )


@torch.inference_mode()
def score_all(
    loaded: Loaded, routers: Routers, rows: Sequence[Row], micro_tokens: int, on_rows: Callable[[int], None]
) -> Forward:
    """Rows as a learner scores them, with the figures that a step of training logs; no correction is applied."""
    result, tally = Forward([], [], {}), Tally()
    for micro in pack(rows, micro_tokens):
        batch = collate(micro).to(loaded.module.device)
        scores = score(loaded.module, batch, routers)
        assert scores.routed is not None
        batch, used = replace(batch, logp_prox=scores.logp), scores.routed.used()
        tally_mismatch(tally, batch, scores.places, torch.ones_like(scores.logp), (0.0, float("inf")))
        tally_routing(tally, batch, scores.routed.differ(), used, routers.num_experts)
        lengths = [len(row) for row in micro]
        result.logp.extend(scores.logp.cpu().split(lengths))
        result.routes.extend(used.cpu().split(lengths))
        on_rows(len(result.logp))
    result.metrics.update(metrics(tally))
    return result


def _as_scored(row: Row, logp: Tensor, routes: Tensor) -> Row:
    """What a forward said of a row, in the sampler's place."""
    return replace(row, logp_behav=torch.where(row.mask, logp, 0.0), routes=routes, replayed=False)


def _probabilities(rows: Sequence[Row], logp: Sequence[Tensor]) -> Floats:
    return torch.cat([x[row.mask] for row, x in zip(rows, logp, strict=True)]).double().exp().numpy()


def _comparison(key: str, label: str, axes: tuple[str, str], x: Floats, y: Floats, found: Forward) -> Comparison:
    return Comparison(key=key, label=label, x_label=axes[0], y_label=axes[1], x=x, y=y, metrics=found.metrics)


def _differing(row: Row, ids: Tensor) -> NDArray[np.int64]:
    """[T-1, L]: how many of the recorded experts are not among `ids`."""
    assert row.routes is not None
    missed = ~(row.routes[:-1, :, :, None] == ids[:-1, :, None, :]).any(-1)
    return missed.sum(-1).numpy()


def _facts(recipe: Recipe, loaded: Loaded, routers: Routers, rows: Sequence[Row]) -> dict[str, str]:
    low_bit = recipe.rollout.precision is not None
    dtype = str(loaded.module.dtype).removeprefix("torch.")
    aligned = low_bit and recipe.learner.alignment == "aligned"
    return {
        "experts": f"{routers.top_k} of {routers.num_experts} in {routers.num_layers} layers",
        "sampler": precision_words(recipe.rollout.precision) if low_bit else dtype,
        "learner": f"{precision_words(recipe.rollout.precision)}, aligned" if aligned else dtype,
        "answers": str(len(rows)),
        "sampled tokens": f"{sum(int(row.mask.sum()) for row in rows):,}",
        "device": loaded.module.device.type,
    }
