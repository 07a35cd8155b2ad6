"""From judged groups to rows with advantages, and who is left out on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from lockstep.algorithms.pieces import Advantage, Episodes
from lockstep.algorithms.reference import Penalty
from lockstep.data.packing import Row, row_of
from lockstep.learner.routes import RouteCheck
from lockstep.types import Group, Trajectory


@dataclass(frozen=True, slots=True)
class Judged:
    """The answers of one complete group that may be learned from."""

    rows: tuple[Row, ...]
    rewards: tuple[float, ...]


def admit(
    group: Group, version: int, truncated: str, left_out: Counter[str], check_routes: RouteCheck | None = None
) -> Judged:
    """Who trains. Those left out are in no group mean either; `left_out` counts them by reason.

    Without `check_routes` nobody reads expert routes, and there may be none.
    """
    kept: list[Trajectory] = []
    for trajectory in group.trajectories:
        if reason := why_not(trajectory, truncated):
            left_out[reason] += 1
        elif check_routes is None and trajectory.routes is not None:
            raise ValueError(f"answer {trajectory.uid!r} brings expert routes, which this learner does not read")
        else:
            kept.append(trajectory)
    if check_routes is not None:
        check_routes(kept)
    rewards = tuple(t.verdict.value for t in kept if t.verdict.value is not None)
    replayed = check_routes is not None and check_routes.replayed
    return Judged(tuple(replace(row_of(t, version), replayed=replayed) for t in kept), rewards)


def why_not(trajectory: Trajectory, truncated: str) -> str | None:
    """The reason an answer cannot be learned from; None if it can."""
    if trajectory.verdict.failed:
        return "failed"
    if not trajectory.mask.any():
        return "empty"
    if not trajectory.logp_behav[trajectory.mask].isfinite().all():
        return "refused"
    return "truncated" if trajectory.truncated and truncated == "mask" else None


def penalise(group: Judged, penalty: Penalty) -> Judged:
    """Every scored answer pays for its distance from the reference."""
    return replace(
        group, rewards=tuple(R - _toll(row, penalty) for row, R in zip(group.rows, group.rewards, strict=True))
    )


def _toll(row: Row, penalty: Penalty) -> float:
    assert row.logp_prox is not None
    assert row.logp_ref is not None
    return penalty(row.logp_prox[row.mask], row.logp_ref[row.mask])


def with_advantages(groups: Sequence[Judged], advantage: Advantage) -> list[Row]:
    """All rows in order, each with its advantage and, where it was scored with a value head, its returns."""
    groups = [group for group in groups if group.rows]
    if advantage.scope == "batch" and groups:
        groups = [Judged(tuple(r for g in groups for r in g.rows), tuple(x for g in groups for x in g.rewards))]
    return [row for group in groups for row in _advantages_of(group, advantage)]


def _advantages_of(group: Judged, advantage: Advantage) -> list[Row]:
    lengths = [int(row.mask.sum()) for row in group.rows]
    seq = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    values = [row.values[row.mask] for row in group.rows if row.values is not None]
    rewards = torch.tensor(group.rewards, dtype=torch.float64)
    A = advantage(Episodes(rewards, seq, torch.cat(values) if values else None))
    return [_with(row, part) for row, part in zip(group.rows, A.split(lengths), strict=True)]


def _with(row: Row, sampled: Tensor) -> Row:
    advantage = row.advantage.masked_scatter(row.mask, sampled)
    return replace(row, advantage=advantage, returns=None if row.values is None else advantage + row.values)


def split(rows: Sequence[Row], parts: int) -> list[list[Row]]:
    """Contiguous parts of as equal a number of rows as can be; fewer parts if there are fewer rows."""
    parts = max(1, min(parts, len(rows)))
    cuts = [len(rows) * i // parts for i in range(parts + 1)]
    return [list(rows[a:b]) for a, b in pairwise(cuts)]
