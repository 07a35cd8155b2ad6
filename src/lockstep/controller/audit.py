"""The audit: both sides say what every weight runs in and what its bytes are. Any difference ends the run.

A layer that is low-bit on one side only, or that missed a weight update, changes nothing one would notice at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from lockstep.protocols import Engine, Learner
from lockstep.types import Operator

SAMPLE = 4  # weights looked at after every sync; all of them before the first step
SHOWN = 3


class AuditFailed(Exception):  # noqa: N818 - reads as what happened
    """Sampler and learner do not run the same model. The text says where they differ."""


@dataclass(slots=True)
class Audit:
    engine: Engine
    learner: Learner
    aligned: bool  # formats must agree too, not only the bytes that were published
    _names: list[str] = field(default_factory=list)

    async def whole(self) -> None:
        """Every weight; raises AuditFailed."""
        learner = await self.learner.operators()
        self._names = sorted(learner)
        self._compare(await self.engine.operators(self._names), learner)

    async def sample(self, version: int) -> None:
        """A few weights, others after every sync; raises AuditFailed."""
        names = Random(version).sample(self._names, min(SAMPLE, len(self._names)))
        self._compare(await self.engine.operators(names), await self.learner.operators(names))

    def _compare(self, engine: Mapping[str, Operator], learner: Mapping[str, Operator]) -> None:
        if found := differences(engine, learner, aligned=self.aligned):
            more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            raise AuditFailed(f"sampler and learner do not run the same model: {'; '.join(found[:SHOWN])}{more}")


def differences(engine: Mapping[str, Operator], learner: Mapping[str, Operator], *, aligned: bool) -> list[str]:
    """In words. Without `aligned` the learner may compute in another format than the one it publishes."""
    found = []
    for name, ours in learner.items():
        theirs = engine.get(name)
        if theirs is None:
            found.append(f"{name}: not in the sampler")
        elif theirs.digest != ours.digest:
            found.append(f"{name}: the sampler's bytes are not those that were published")
        elif aligned and theirs.format != ours.format:
            found.append(f"{name}: {theirs.format} in the sampler, {ours.format} in the learner")
        elif aligned and theirs.kernel != ours.kernel:
            found.append(f"{name}: computed by {theirs.kernel} in the sampler, by {ours.kernel} in the learner")
    return found
