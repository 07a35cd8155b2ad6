"""The order in which a run visits its samples, computed rather than stored."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

_ROUNDS = 4  # a Feistel network of four keyed rounds is a pseudo-random permutation


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """Place i of a run -> sample number; each epoch visits every sample once, in an order of its own.

    A pure function of (seed, i), so a resumed run goes on in the same order with nothing to restore, and a
    dataset of any size costs no memory.
    """

    num_samples: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"num_samples is {self.num_samples}: there must be at least one sample to order")

    def __getitem__(self, index: int) -> int:
        epoch, place = divmod(index, self.num_samples)
        while True:  # the network permutes a power of four; walking its cycle until inside permutes num_samples
            place = self._permute(place, epoch)
            if place < self.num_samples:
                return place

    def _permute(self, place: int, epoch: int) -> int:
        half = ((self.num_samples - 1).bit_length() + 1) // 2
        low = (1 << half) - 1
        left, right = place >> half, place & low
        for turn in range(_ROUNDS):
            left, right = right, left ^ (self._hash(epoch, turn, right) & low)
        return left << half | right

    def _hash(self, epoch: int, turn: int, value: int) -> int:
        text = f"{self.seed}/{epoch}/{turn}/{value}".encode()
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
