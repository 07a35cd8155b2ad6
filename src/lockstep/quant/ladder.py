"""Precisions of sampling as a recipe names them: from low to high, which the governor climbs when sampler and learner
drift apart, and those that give the same bits in any batch."""

from __future__ import annotations

from lockstep.config import Plugin
from lockstep.quant import FORMATS

HIGH = "high"  # how a recipe calls the precision the learner computes in, which is no format
EIGHT_BITS = Plugin(package=FORMATS, name="int8_w8a8")


def higher(precision: Plugin | None) -> list[Plugin | None]:
    """The rungs above a recipe's precision, lowest first: 8 bits for fewer, then none at all."""
    if precision is None:
        return []
    bits: int = precision.cls.bits  # type: ignore[attr-defined]
    return [EIGHT_BITS, None] if bits < 8 else [None]


def batch_invariant(precision: Plugin | None) -> bool:
    """Whether on a GPU a token's products are the same bits, whatever is computed with it."""
    return precision is not None and precision.build().batch_invariant
