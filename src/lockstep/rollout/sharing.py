"""Which sequences of a batch begin with the same pages, so that attention reads these once for all of them.

The answers to one prompt arrive one after the other and find its pages in the prefix cache: they are neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lockstep.models.paged import MEMBERS


class Neighbours(NamedTuple):
    first: int  # sequence of the batch
    members: int
    pages: int  # that all of them begin with


def find_neighbours(pages: Sequence[list[int]]) -> list[Neighbours]:
    """Everyone is in one group. One that begins with fewer of the pages than the others share starts its own."""
    groups: list[Neighbours] = []
    for number, own in enumerate(pages):
        if groups:
            first, members, common = groups[-1]
            lead = pages[first]
            if members == 1:
                common = _common(lead, own)
            if common and members < MEMBERS and own[:common] == lead[:common]:
                groups[-1] = Neighbours(first, members + 1, common)
                continue
        groups.append(Neighbours(number, 1, 0))
    return groups


def _common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(one), len(other)))


def pays(groups: Sequence[Neighbours], num_pages: int) -> bool:
    """An eighth of the reading saved is worth putting together what was read apart."""
    return 8 * sum((group.members - 1) * group.pages for group in groups) > num_pages


def alone(end: int, first: int = 0) -> list[Neighbours]:
    return [Neighbours(number, 1, 0) for number in range(first, end)]


def as_rows(groups: Sequence[Neighbours], size: int, page_size: int) -> list[list[int]]:
    """The fields of `Shared` for a batch of `size`."""
    empty = [0] * (size - len(groups))
    before = [group.pages * page_size for group in groups for _ in range(group.members)]
    return [
        [*(group.first for group in groups), *empty],
        [*(group.members for group in groups), *empty],
        [*(group.pages * page_size for group in groups), *empty],
        before,
    ]
