"""The weight store of a single process."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class Memory:
    """Implements protocols.WeightStore: the newest version only.

    Where sampling and learning overlap it is a `snapshot`, so that the learner can go on updating while the engine is
    still on its way to the version; it is made into the same buffers every time. Where they take turns, the learner's
    tensors themselves are the version.
    """

    def __init__(self, *, snapshot: bool) -> None:
        self._snapshot = snapshot
        self._version = -1
        self._weights: dict[str, Tensor] = {}

    def put(self, version: int, weights: Mapping[str, Tensor]) -> None:
        self._version = version
        if not self._snapshot:
            self._weights = dict(weights)
            return
        for name, tensor in weights.items():
            held = self._weights.get(name)
            if held is None:
                self._weights[name] = tensor.detach().clone()
            else:
                held.copy_(tensor.detach())

    def get(self, version: int) -> Mapping[str, Tensor]:
        if version != self._version:
            raise LookupError(f"weight version {version} is not held; held: {self._version}")
        return self._weights
