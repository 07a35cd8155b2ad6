"""Expert routes at the learner's door: what is wrong stops the run, what is missing is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from lockstep.models.routing import Routers
from lockstep.types import Routes, Trajectory


@dataclass(slots=True)
class RouteCheck:
    """Of the answers of one step. Where a row is missing the learner chooses, once for all updates of the step."""

    routers: Routers
    replayed: bool = True  # otherwise they are only compared with, and there may be none
    missing: int = 0  # rows
    rerecorded: int = 0  # rows that were computed again, by newer weights than drew the token after them
    _seen: dict[bool, str] = field(default_factory=dict)  # the first answer with routes, and the first without

    def __call__(self, answers: Sequence[Trajectory]) -> None:
        """ValueError, with the likely cause, for routes that cannot be what the engine ran.

        All answers of a group at once: looking at one takes the host as long, unless it is long itself.
        """
        self._require_all_or_none(answers)
        if not self.replayed:
            answers = [answer for answer in answers if answer.routes is not None]
        if not answers:
            return
        for answer in answers:
            _refuse(answer, _misshapen(answer, self.routers))
        found = [routes for answer in answers if (routes := answer.routes) is not None]
        if problem := _wrong_ids(_known(found), self.routers):
            wrong = [bool(_wrong_ids(_known([routes]), self.routers)) for routes in found]
            _refuse(answers[wrong.index(True) if any(wrong) else 0], problem)
        by = torch.cat([routes.versions for routes in found])
        drawn = torch.cat([answer.versions[1:] for answer in answers])
        self.missing += int((by < 0).sum())
        self.rerecorded += int(((by != drawn) & (by >= 0) & (drawn >= 0)).sum())

    def _require_all_or_none(self, answers: Sequence[Trajectory]) -> None:
        """Of the whole step: one engine that records beside one that does not, or an answer that lost its own."""
        for answer in answers:
            self._seen.setdefault(answer.routes is not None, answer.uid)
        if len(self._seen) == 2:
            raise ValueError(
                f"answer {self._seen[False]!r} has no expert routes, but answer {self._seen[True]!r} of the same step "
                "has: either all engines record them, or none"
            )

    @property
    def metrics(self) -> dict[str, float]:
        return {"routing/missing": float(self.missing), "routing/rerecorded": float(self.rerecorded)}


def _refuse(answer: Trajectory, problem: str | None) -> None:
    if problem:
        raise ValueError(f"the expert routes of answer {answer.uid!r} are wrong: {problem}")


def _misshapen(answer: Trajectory, routers: Routers) -> str | None:
    routes = answer.routes
    if routes is None:
        return "no answer so far has any, so the engine does not record them; learner.routing = r2 or off does without"
    if routes.ids.ndim != 3:
        return f"ids are {list(routes.ids.shape)}, not [rows, layers, top-k]"
    if routes.ids.dtype != routers.dtype:
        return f"ids are of {routes.ids.dtype}, not of {routers.dtype}, as those of {routers.num_experts} experts are"
    if routes.versions.ndim != 1 or routes.versions.dtype not in (torch.int32, torch.int64):
        return f"versions are {list(routes.versions.shape)} of {routes.versions.dtype}, not a whole number for each row"
    num_tokens, (rows, *row) = len(answer.tokens), routes.ids.shape
    if len(routes.versions) != rows:
        return f"{len(routes.versions)} versions for {rows} rows of ids: each has one"
    if rows != num_tokens - 1:
        return (
            f"{rows} rows for {num_tokens} tokens, of which all but the last have one: a turn, or a part of an answer "
            "that was interrupted, came without its own or brought them twice"
        )
    if row != [routers.num_layers, routers.top_k]:
        return f"{row} ids per token, the model has {[routers.num_layers, routers.top_k]}: the engine runs another one"
    return None


def _known(found: Sequence[Routes]) -> Tensor:
    """The ids of all rows that were not lost."""
    ids, known = torch.cat([routes.ids for routes in found]), torch.cat([routes.versions for routes in found]) >= 0
    return ids if known.all() else ids[known]


def _wrong_ids(ids: Tensor, routers: Routers) -> str | None:
    if not ids.numel():
        return None
    low, high = (int(x) for x in ids.aminmax())
    if low < 0 or high >= routers.num_experts:
        return (
            f"expert {low if low < 0 else high} of {routers.num_experts}: the ids overflowed their type, or are stale"
        )
    if _repeats(ids):
        return "a router chose an expert twice, as in memory that was never written: something runs past the recording"
    if routers.top_k == 1 and ids.numel() >= 64 and routers.num_experts > 1 and high == 0:
        return "every router chose expert 0 for every token, as in memory that was never written"
    return None


def _repeats(ids: Tensor) -> bool:
    """Whether a choice [rows, L, k] names an expert twice. By columns: to sort millions of choices takes many times as
    long, and this runs on the host while the device waits."""
    columns = [column.contiguous() for column in ids.flatten(0, 1).unbind(1)]
    twice = torch.zeros_like(columns[0], dtype=torch.bool)
    for a, b in combinations(columns, 2):
        twice |= a == b
    return bool(twice.any())
