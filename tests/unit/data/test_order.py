import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.order import PromptOrder


@given(st.integers(1, 300), st.integers(0, 2**40), st.integers(0, 5))
def test_every_epoch_visits_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    order = PromptOrder(num_samples, seed)
    visited = [order[epoch * num_samples + i] for i in range(num_samples)]
    assert sorted(visited) == list(range(num_samples))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [tuple(PromptOrder(50, seed)[50 * epoch + i] for i in range(50)) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4
    assert tuple(range(50)) not in orders


def test_order_is_the_same_forever() -> None:
    """A resumed run depends on it: these numbers may never change."""
    order = PromptOrder(10, seed=0)
    assert [order[i] for i in range(20)] == [5, 9, 1, 6, 4, 2, 3, 7, 0, 8, 9, 8, 2, 1, 3, 6, 0, 4, 7, 5]


def test_no_place_is_favoured() -> None:
    """The sample at place 0 over many seeds is close to uniform."""
    counts = [0] * 5
    for seed in range(2000):
        counts[PromptOrder(5, seed)[0]] += 1
    assert max(counts) < 480
    assert min(counts) > 320


def test_a_huge_dataset_costs_nothing() -> None:
    order = PromptOrder(10**15, seed=3)
    assert len({order[i] for i in range(100)}) == 100


def test_nothing_to_order() -> None:
    with pytest.raises(ValueError, match="num_samples is 0"):
        PromptOrder(0, seed=0)
