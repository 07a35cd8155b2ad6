"""A weight in a low-bit format: the very tensors that are published, run by the engine and by the learner's forward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.quant.kernels.reference import GROUP as ROWS_OF_A_BLOCK


@dataclass(frozen=True, slots=True)
class Encoded:
    """A weight [out, in], or [experts, out, in], as codes and float32 scales."""

    codes: Tensor  # int8 or float8_e4m3fn [..., out, in]; uint8 [..., out, ceil(in / 2)] holds two 4-bit codes a byte
    scales: Tensor  # float32; how many values share one, and in which order they lie, is the format's business
    shape: tuple[int, ...]  # of the weight

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What is published, by the name it has below the weight's own."""
        return {"codes": self.codes, "scales": self.scales}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    @property
    def finite(self) -> Tensor:
        """Whether the weight was, as a scalar on the device: a scale is finite only if all values under it are."""
        return torch.isfinite(self.scales).all()

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


def stack(parts: Sequence[Encoded]) -> tuple[Encoded, list[Encoded]]:
    """Weights of the same input as one weight, [Σ out, in], and each of them as a view of it: a product with the whole
    gives the products with the parts side by side, bit for bit, and what is copied into a part changes the whole.

    ValueError if they are not `stackable`.
    """
    if not stackable(parts):
        raise ValueError(f"cannot stack weights {[part.shape for part in parts]}: a block of rows is not full")
    codes, scales = torch.cat([part.codes for part in parts]), _stacked([part.scales for part in parts])
    whole = Encoded(codes, scales, (codes.shape[0], *parts[0].shape[1:]))
    views = zip(
        codes.split([len(part.codes) for part in parts]),
        scales.split([len(part.scales) for part in parts]),
        strict=True,
    )
    return whole, [Encoded(*view, part.shape) for view, part in zip(views, parts, strict=True)]


def _stacked(scales: Sequence[Tensor]) -> Tensor:
    """One after the other; those that lie group by group still do."""
    if all(part.is_contiguous() for part in scales):
        return torch.cat(list(scales))
    return torch.cat([part.mT for part in scales], -1).mT


def stackable(parts: Sequence[Encoded]) -> bool:
    """Whether no block of rows that shares a scale would reach over two of them."""
    return all(len(part.scales) == len(part.codes) or len(part.codes) % ROWS_OF_A_BLOCK == 0 for part in parts[:-1])
