"""Groups of neighbours that begin with the same pages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.models.paged import MEMBERS
from lockstep.rollout.sharing import Neighbours, alone, as_rows, find_neighbours, pays

PAGES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=24)


@given(PAGES)
def test_everyone_is_in_one_group_that_really_begins_alike(pages: list[list[int]]) -> None:
    groups = find_neighbours(pages)
    covered = [g.first + i for g in groups for i in range(g.members)]
    assert covered == list(range(len(pages)))
    for first, members, common in groups:
        assert members <= MEMBERS
        assert (common > 0) == (members > 1)
        assert all(pages[first + i][:common] == pages[first][:common] for i in range(members))
        assert all(len(pages[first + i]) >= common for i in range(members))


def test_siblings_keep_to_themselves_though_all_share_a_system_prompt() -> None:
    system = [1, 2]
    pages = [[*system, 10, 11, 100 + i] for i in range(10)] + [[*system, 20, 21, 200 + i] for i in range(3)]
    assert find_neighbours(pages) == [Neighbours(0, 8, 4), Neighbours(8, 2, 4), Neighbours(10, 3, 4)]


def test_sharing_is_worth_it_where_much_is_shared() -> None:
    assert pays([Neighbours(0, 8, 4)], num_pages=8 * 10)
    assert not pays([Neighbours(0, 2, 1), *alone(12, first=2)], num_pages=100)


def test_rows_give_groups_and_what_each_sequence_leaves_to_its_group() -> None:
    rows = as_rows([Neighbours(0, 2, 3), Neighbours(2, 1, 0)], size=3, page_size=16)
    assert rows == [[0, 2, 0], [2, 1, 0], [48, 0, 0], [48, 48, 0]]
