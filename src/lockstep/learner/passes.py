"""The two ways through a step's groups.

`Streamed`: one update, so the gradient of every full round is taken at once, while later groups are still sampled,
and the forward's own log-probs are the proximal ones. `Replayed`: several updates, a value head, batch-wide
advantages or a KL in the reward; a first pass freezes the proximal log-probs, and the updates come when the step is
complete.

A round is as many rows as fill a micro-batch on every rank; which rows it holds depends on their order alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.algorithms.diagnostics import Tally, explained, tally_entropy, tally_kl, tally_mismatch, tally_routing
from lockstep.algorithms.objective import Objective
from lockstep.algorithms.pieces import Advantage
from lockstep.algorithms.reference import Penalty
from lockstep.data.packing import Packer, Row, collate
from lockstep.learner.config import LearnerConfig
from lockstep.learner.rows import Judged, penalise, split, with_advantages
from lockstep.learner.scoring import Scores
from lockstep.learner.updates import Applied, Updater
from lockstep.models.routing import Routers
from lockstep.types import Batch


@dataclass(frozen=True, slots=True)
class Outcome:
    applied: list[Applied]
    explained: float | None = None  # by the value head, where there is one


class Pass(Protocol):
    tally: Tally

    def take(self, group: Judged) -> None: ...

    def measure(self) -> None:
        """All groups are in: the tally gets the rest of what can be told before an update."""
        ...

    def finish(self, skip: bool) -> Outcome:
        """After `measure`, once. With `skip` no update is made."""
        ...


class Streamed:
    def __init__(self, updater: Updater, objective: Objective, advantage: Advantage) -> None:
        assert advantage.scope == "group", "its gradient would be taken before the groups its mean is over are in"
        assert not advantage.needs_values, "there are no values before the forward that the gradient is taken of"
        self.tally = Tally()
        self._updater, self._objective, self._advantage = updater, objective, advantage
        self._packer = Packer(updater.round_tokens)

    def take(self, group: Judged) -> None:
        for row in with_advantages([group], self._advantage):
            self._learn(self._packer.add(row) or [])

    def measure(self) -> None:
        self._learn(self._packer.flush())

    def finish(self, skip: bool) -> Outcome:
        return Outcome([self._updater.skip() if skip else self._updater.apply()])

    def _learn(self, rows: Sequence[Row]) -> None:
        for micro in self._updater.shares(rows):
            batch, scores, part = self._updater.backward(micro, self._objective, self.tally)
            tally_mismatch(self.tally, batch, scores.places, part.weight, self._objective.correction.bounds)
            tally_entropy(self.tally, batch, scores.entropy)
            tally_kl(self.tally, batch)
            _tally_routing(self.tally, batch, scores, self._updater.routers)


@dataclass(frozen=True, slots=True)
class Frozen:
    """What the learner, and the reference if there is one, thought of a row before the first update."""

    logp: Tensor  # [T]
    logp_ref: Tensor | None  # [T]
    values: Tensor | None  # [T]
    routes: Tensor | None  # [T, MoE layers, top-k], the experts it ran with, where the row did not bring them all


@dataclass
class Replayed:
    updater: Updater
    objective: Objective
    advantage: Advantage
    config: LearnerConfig
    penalty: Penalty | None = None
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self._packer = Packer(self.updater.round_tokens)
        self._groups: list[Judged] = []
        self._place: dict[Row, int] = {}  # of a row in the step: the same on all ranks
        self._frozen: dict[int, Frozen] = {}  # by place; each rank scores its share
        self._rows: list[Row] = []  # with advantages, once all is measured

    def take(self, group: Judged) -> None:
        self._groups.append(group)
        for row in group.rows:
            self._place[row] = len(self._place)
            self._freeze(self._packer.add(row) or [])

    def measure(self) -> None:
        self._freeze(self._packer.flush())
        self._rows = with_advantages(self._scored_groups(), self.advantage)
        self._compare()

    def finish(self, skip: bool) -> Outcome:
        minis = split(self._rows, self.config.mini_steps) * self.config.epochs
        applied = [self.updater.skip() if skip else self._update(mini) for mini in minis]
        return Outcome(applied, _explained(self._rows) if self.advantage.needs_values else None)

    def _freeze(self, rows: Sequence[Row]) -> None:
        for micro in self.updater.shares(rows):
            batch, scores = self.updater.score(micro)
            tally_entropy(self.tally, batch, scores.entropy)
            tally_kl(self.tally, batch)
            _tally_routing(self.tally, batch, scores, self.updater.routers)
            routes = scores.routed.used() if scores.routed and self._keeps_routes(micro) else None
            columns = (_by_row(micro, x) for x in (scores.logp, batch.logp_ref, scores.value, routes))
            for row, frozen in zip(micro, map(Frozen, *columns), strict=True):
                if row in self._place:  # a blank one is not
                    self._frozen[self._place[row]] = frozen

    def _keeps_routes(self, micro: Sequence[Row]) -> bool:
        """Whether the updates are to run the experts of this forward, and not all of them are known already."""
        return self.config.routing != "off" and not all(map(_is_routed, micro))

    def _compare(self) -> None:
        """Sampler and learner, once the sign of every advantage is known. The host still has all that this takes."""
        for micro in self.updater.shares(self._rows):
            batch = collate(micro)
            places, batch = batch.mask.nonzero().squeeze(1), batch.to(self.updater.ranks.device)
            weight, bounds = self.objective.correction(batch), self.objective.correction.bounds
            tally_mismatch(self.tally, batch, places.to(weight.device), weight, bounds)

    def _scored_groups(self) -> list[Judged]:
        frozen = self.updater.ranks.merge(self._frozen)
        groups = [replace(g, rows=tuple(_scored(r, frozen[self._place[r]]) for r in g.rows)) for g in self._groups]
        return [penalise(group, self.penalty) for group in groups] if self.penalty else groups

    def _update(self, rows: Sequence[Row]) -> Applied:
        for micro in self.updater.shares(rows):
            self.updater.backward(micro, self.objective, self.tally)
        return self.updater.apply()


def _tally_routing(tally: Tally, batch: Batch, scores: Scores, routers: Routers | None) -> None:
    if routers is not None and scores.routed is not None:
        tally_routing(tally, batch, scores.routed.differ(), scores.routed.used(), routers.num_experts)


def _by_row(rows: Sequence[Row], x: Tensor | None) -> Sequence[Any]:
    """What is [N] over packed rows, or absent, as [T] of each on the host."""
    return [None] * len(rows) if x is None else x.cpu().split([len(row) for row in rows])


def _is_routed(row: Row) -> bool:
    """Every token that counts has the experts it is to run: the last one is attended to by none."""
    return row.replayed and row.routed is not None and bool(row.routed[:-1].all())


def _scored(row: Row, frozen: Frozen) -> Row:
    """With the experts it was scored with, where it did not bring them: all updates of a step run the same ones."""
    if frozen.routes is not None:
        row = replace(row, routes=frozen.routes, routed=torch.ones(len(row), dtype=torch.bool), replayed=True)
    return replace(row, logp_prox=frozen.logp, logp_ref=frozen.logp_ref, values=frozen.values)


def _explained(rows: Sequence[Row]) -> float | None:
    pairs = [
        (row.returns[row.mask], row.values[row.mask])
        for row in rows
        if row.returns is not None and row.values is not None
    ]
    return explained(*(torch.cat(column) for column in zip(*pairs, strict=True))) if pairs else None
