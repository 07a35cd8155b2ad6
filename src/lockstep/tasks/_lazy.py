"""Samples made when they are asked for, and splits that cannot overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from random import Random
from typing import Any, TypeVar

from lockstep.config import ConfigError
from lockstep.types import Sample

Problem = TypeVar("Problem")

_SHARES = {"eval": (0.0, 0.2), "demonstrations": (0.2, 0.6), "train": (0.6, 1.0)}  # of all problems there are
_MOST_DRAWS = 10_000


class LazySamples(Sequence[Sample]):
    """`length` samples, the i-th being `make(i)`."""

    def __init__(self, length: int, make: Callable[[int], Sample]) -> None:
        self._length = length
        self._make = make

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        places = range(self._length)[index]  # negative indices and slices as in any sequence
        return self._make(places) if isinstance(places, int) else [self._make(i) for i in places]


def hash_share(text: str) -> float:
    """A number in [0, 1) that depends on the text alone: the same in every run, on every machine, for every seed."""
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big") / 2**56


def split_of(key: str) -> str:
    """The one split that the problem named `key` may appear in, whatever the seed."""
    share = hash_share(key)
    return next(split for split, (low, high) in _SHARES.items() if low <= share < high)


def draw(
    seed: int, split: str, index: int, propose: Callable[[Random], Problem], key: Callable[[Problem], str]
) -> Problem:
    """Problem number `index` of `split`: the first one proposed, from a generator of its own, that belongs there."""
    if split not in _SHARES:
        raise ConfigError(f"unknown split {split!r}; choices: {', '.join(_SHARES)}")
    random = Random(f"{seed}/{split}/{index}")
    for _ in range(_MOST_DRAWS):
        problem = propose(random)
        if split_of(key(problem)) == split:
            return problem
    raise ConfigError(f"no problem for split {split!r} in {_MOST_DRAWS} draws: the task's options allow too few")
