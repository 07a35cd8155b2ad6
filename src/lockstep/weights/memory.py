"""The weight store of a single process."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class Memory:
    """Implements protocols.WeightStore: the newest version only, as its own copy.

    The copy lets the learner go on updating while the engine is still on its way to the version. It is made into the
    same buffers every time, so memory does not grow.
    """

    def __init__(self) -> None:
        self._version = -1
        self._weights: dict[str, Tensor] = {}

    def put(self, version: int, weights: Mapping[str, Tensor]) -> None:
        for name, tensor in weights.items():
            held = self._weights.get(name)
            if held is None:
                self._weights[name] = tensor.detach().clone()
            else:
                held.copy_(tensor.detach())
        self._version = version

    def get(self, version: int) -> Mapping[str, Tensor]:
        if version != self._version:
            raise LookupError(f"weight version {version} is not held; held: {self._version}")
        return self._weights
