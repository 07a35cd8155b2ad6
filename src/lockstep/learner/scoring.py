"""What the learner's model thinks of tokens that are already there. The shift by one is done here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from lockstep.models.head import find_head
from lockstep.models.routes import Replay, Routed
from lockstep.models.routing import Routers
from lockstep.models.varlen import Packed, Shared
from lockstep.types import Batch


@dataclass(frozen=True, slots=True)
class Scores:
    """Aligned with the token itself and zero where `batch.mask` is not set."""

    logp: Tensor  # [N] float32, log π_θ at the sampling temperature
    entropy: Tensor  # [N] float32, of the distribution the token was drawn from; no gradient
    value: Tensor | None  # [N] float32, of the state before the token
    places: Tensor  # [M] int64, where the mask is set
    routed: Routed | None = None  # the experts it ran with, where they were asked for


def score(module: nn.Module, batch: Batch, routers: Routers | None = None) -> Scores:
    """One forward of the whole model over packed sequences; only positions that predict a masked token reach the head.

    `batch` must be on the module's device. With `routers`, which the module must obey, the batch's expert routes are
    replayed, or compared with; without, it routes as it likes.
    """
    places = batch.mask.nonzero().squeeze(1)
    rows, tokens, positions, shared = places - 1, batch.tokens, batch.positions, None
    if batch.shared is not None:  # what sequences have in common runs once
        shared = Shared.of(batch.shared)
        rows, tokens, positions = shared.spread[rows], tokens[shared.kept], positions[shared.kept]
    replay = _replay(batch, shared, routers) if routers else None
    packed = Packed(cu_seqlens=batch.cu_seqlens, max_seqlen=batch.max_seqlen, shared=shared, routing=replay)
    with find_head(module).scoring(rows, batch.tokens[places], batch.temperature):
        out = module(input_ids=tokens[None], position_ids=positions[None], use_cache=False, lockstep=packed).logits[0]
    columns = [out.new_zeros(len(batch.tokens)).index_copy(0, places, column) for column in out.unbind(-1)]
    routed = replay.outcome(shared.spread if shared else None) if replay else None
    return Scores(columns[0], columns[1], columns[2] if len(columns) == 3 else None, places, routed)


def _replay(batch: Batch, shared: Shared | None, routers: Routers) -> Replay:
    """Of the tokens that run."""
    if batch.routes is None or batch.routed is None:
        return Replay(routers)
    if shared is None:
        return Replay(routers, batch.routes, batch.routed, follow=batch.replayed)
    return Replay(routers, batch.routes[shared.kept], batch.routed[shared.kept], follow=batch.replayed)
