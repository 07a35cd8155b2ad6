"""A weight in a low-bit format: the very tensors that are published, run by the engine and by the learner's forward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Encoded:
    """A weight [out, in], or [experts, out, in], as codes and float32 scales."""

    codes: Tensor  # int8 or float8_e4m3fn [..., out, in]; uint8 [..., out, ceil(in / 2)] holds two 4-bit codes a byte
    scales: Tensor  # float32; how many values share one is the format's business
    shape: tuple[int, ...]  # of the weight

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What is published, by the name it has below the weight's own."""
        return {"codes": self.codes, "scales": self.scales}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def expert(self, index: int) -> Encoded:
        """A view of one expert's weight."""
        return Encoded(self.codes[index], self.scales[index], self.shape[1:])

    @torch.no_grad()
    def copy_(self, other: Encoded) -> None:
        """Takes over `other` byte for byte, in place: whoever shares these tensors sees it."""
        if self.shape != other.shape or self.codes.dtype != other.codes.dtype:
            raise ValueError(f"{other.codes.dtype} {other.shape} does not fit {self.codes.dtype} {self.shape}")
        self.codes.copy_(other.codes)
        self.scales.copy_(other.scales)

    def changed(self, other: Encoded) -> Tensor:
        """The share of codes that differ, as a float32 scalar on the device. Scales are not looked at."""
        differs = self.codes.view(torch.uint8) ^ other.codes.view(torch.uint8)
        if self.codes.dtype == torch.uint8:
            return ((differs & 15 != 0).sum() + (differs >> 4 != 0).sum()) / math.prod(self.shape)
        return (differs != 0).sum() / math.prod(self.shape)

    def same_bytes(self, other: Encoded) -> bool:
        """Whether codes and scales are equal to the last bit (waits for the device)."""
        pairs = zip(self.tensors.values(), other.tensors.values(), strict=True)
        return self.shape == other.shape and all(torch.equal(_bytes(a), _bytes(b)) for a, b in pairs)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
