"""Formats in the words of compressed-tensors, the checkpoint layout that vLLM and transformers read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.quant.kernels.reference import GROUP

INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
PER_CHANNEL = {"strategy": "channel"}
PER_TOKEN = {"strategy": "token", "dynamic": True}
BLOCKS = {"strategy": "block", "block_structure": [GROUP, GROUP]}
PER_GROUP = {"strategy": "group", "group_size": GROUP, "dynamic": True}


@dataclass(frozen=True, slots=True)
class Scheme:
    container: str  # how codes are stored
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None
    readable_experts: bool  # by transformers; vLLM reads all of them

    @property
    def grouped(self) -> bool:
        """Whether a row has several scales."""
        return self.weights["strategy"] != "channel"

    @property
    def rows_per_scale(self) -> int:
        return GROUP if self.weights["strategy"] == "block" else 1
