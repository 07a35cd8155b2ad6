"""One request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.types import Completion, Request, Routes, StopReason


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` grows by sampling; the first `num_computed` of them have keys and values in `pages`."""

    request: Request
    arrival: int  # order of submission: older ones are served first and preempted last
    tokens: list[int]
    limit: int  # most tokens it may come to have
    logp: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    computed_by: list[int] = field(default_factory=list)  # the weight version of each computed token
    node: int | None = None  # prefix-cache node of the last cached page; None: never shared (mixed weights)
    num_cached_pages: int = 0  # leading pages that are in the prefix cache
    row: int = -1  # row of the block table while running
    seating: int = -1  # number of this stay in a row: a sequence that was preempted comes back with another
    stop_reason: StopReason | None = None

    @classmethod
    def of(cls, request: Request, arrival: int, context: int) -> Sequence:
        limit = min(len(request.tokens) + request.params.max_tokens, context)
        return cls(request=request, arrival=arrival, tokens=list(request.tokens), limit=limit)

    @property
    def num_prompt(self) -> int:
        return len(self.request.tokens)

    @property
    def sampled(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    def completion(self, routes: Routes | None = None) -> Completion:
        assert self.stop_reason is not None
        return Completion(
            uid=self.request.uid,
            tokens=self.sampled,
            logp=self.logp,
            versions=self.versions,
            stop_reason=self.stop_reason,
            routes=routes,
        )
