"""Sharing rows between ranks, without any ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.packing import Row, example_row
from lockstep.learner.ranks import Front, Ranks, balance, join, leave

CPU = torch.device("cpu")


def make_row(length: int) -> Row:
    return example_row(torch.zeros(length, dtype=torch.long), torch.arange(length) > 0)


@given(st.lists(st.integers(2, 50), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 100))
@settings(max_examples=50, deadline=None)
def test_every_row_is_on_exactly_one_rank_and_all_run_equally_often(
    lengths: list[int], world: int, budget: int
) -> None:
    rows = [make_row(length) for length in lengths]
    shares = [Ranks(CPU, rank, world).share(rows, budget) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    real = [row for share in shares for micro in share for row in micro if row.mask.any()]
    assert sorted(map(id, real)) == sorted(map(id, rows))
    assert all(sum(map(len, micro)) <= max(budget, len(micro[0])) for share in shares for micro in share)


@given(st.lists(st.integers(2, 50), min_size=1, max_size=30), st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_shares_are_balanced_to_within_one_row_and_keep_the_order(lengths: list[int], world: int) -> None:
    rows = [make_row(length) for length in lengths]
    parts = balance(rows, world)
    tokens = [sum(map(len, part)) for part in parts]
    assert max(tokens) - min(tokens) <= max(lengths)
    place = {row: i for i, row in enumerate(rows)}
    assert all([place[row] for row in part] == sorted(place[row] for row in part) for part in parts)


class Core:
    def double(self, x: int) -> int:
        return 2 * x


def test_alone_nothing_is_exchanged() -> None:
    ranks = join(CPU)
    assert (ranks.rank, ranks.world) == (0, 1)
    x = torch.ones(2)
    assert ranks.sum(x) is x
    assert ranks.merge({1: "a"}) == {1: "a"}
    front = Front(Core())
    assert front.call("double", 4) == 8
    front.stop()
    leave()


def test_a_rank_takes_its_own_gpu_before_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, object]] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set_device", device)))
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, timeout, device_id: calls.append((backend, device_id))
    )
    gpu = torch.device("cuda", 1)
    assert join(gpu).device == gpu
    assert calls == [("set_device", gpu), ("cpu:gloo,cuda:nccl", gpu)]
