"""The one seam for the routers of a mixture of experts: whoever runs a forward may see, or decide, who is chosen.

Every router of transformers scores the experts and picks some with one `torch.topk` over [tokens, experts]; then it
weighs them by a rule of its own (softmax before or after, normalised or not, sigmoid and bias). So its own forward runs
and only that call is answered for it: recorded ids in place of the live ones. The weight rule then works on the logits
of this very forward, and the router keeps its gradient (R3, Eq. 8), whatever the architecture.

A forward's routes travel with its argument `lockstep`, never through a global: each decoder layer binds its router to
the call under way, also when activation checkpointing calls it again, long after other forwards have run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from lockstep.config import ConfigError


class Routing(Protocol):
    """What a forward does with the routers' choices. Its argument `lockstep` carries one, or None: live routing."""

    def choose(self, number: int, live: Tensor) -> Tensor:
        """Expert ids [tokens, top-k] to use, given those the router picks now. `number` counts MoE layers from 0."""
        ...


@dataclass(frozen=True, slots=True)
class Routers:
    """What the routers of a model choose from."""

    num_layers: int  # MoE layers: dense ones between them do not count
    num_experts: int
    top_k: int

    @property
    def dtype(self) -> torch.dtype:
        """What an expert id is kept in."""
        return torch.uint8 if self.num_experts <= 256 else torch.int16  # torch can do little with uint16


def install_routing(module: PreTrainedModel) -> Routers | None:
    """Makes the routers of a view obey `lockstep.routing`; None for a dense model. Before layers are checkpointed.

    ConfigError if this architecture's routers do not choose as described above.
    """
    blocks = [(layer, *_moe_block(layer)) for layer in decoder_layers(module) if _moe_block(layer)]
    if not blocks:
        return None
    seats = [_Seat(number, layer, block, num_experts) for number, (layer, block, num_experts) in enumerate(blocks)]
    _probe(module, seats)
    kinds = {(seat.num_experts, seat.top_k) for seat in seats}
    if len(kinds) > 1:
        raise ConfigError(f"{type(module).__name__} cannot be replayed: its layers choose differently, {sorted(kinds)}")
    for seat in seats:
        seat.install()
    return Routers(len(seats), *kinds.pop())


def decoder_layers(module: PreTrainedModel) -> list[nn.Module]:
    """The blocks that transformers itself says must stay whole."""
    names = set(module._no_split_modules or ())
    layers = [child for child in module.modules() if type(child).__name__ in names]
    if not layers:
        raise ValueError(f"{type(module).__name__} names no decoder layers, so it cannot be sharded or checkpointed")
    return layers


def _moe_block(layer: nn.Module) -> tuple[nn.Module, int] | tuple[()]:
    """The part of a layer that holds `experts`, and how many there are."""
    for part in layer.modules():
        experts = getattr(part, "experts", None)
        if isinstance(experts, nn.ModuleList):
            return part, len(experts)
        if isinstance(experts, nn.Module):
            return part, next(p.shape[0] for p in experts.parameters() if p.ndim == 3)
    return ()


class _Seat:
    """A router in its layer, and the call it works for."""

    def __init__(self, number: int, layer: nn.Module, block: nn.Module, num_experts: int) -> None:
        self.number, self.layer, self.block, self.num_experts = number, layer, block, num_experts
        self.router, self.top_k = block, 0  # until probed
        self.current: Routing | None = None

    def install(self) -> None:
        """The layer binds, the router obeys. Wrapped are `forward`s, not calls: checkpointing repeats those."""
        self.layer.forward = partial(self._run_layer, self.layer.forward)
        self.router.forward = partial(self._run_router, self.router.forward)

    def _run_layer(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, lockstep = self.current, kwargs.get("lockstep")
        self.current = lockstep.routing if lockstep is not None else None
        try:
            return forward(*args, **kwargs)
        finally:
            self.current = before

    def _run_router(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.current is None:
            return forward(*args, **kwargs)
        with _Answered(self.num_experts, partial(self.current.choose, self.number)) as answered:
            result = forward(*args, **kwargs)
        assert answered.top_ks == [self.top_k], "a router must choose once"
        return result


class _Answered(TorchFunctionMode):
    """Lets `choose` answer every topk over [tokens, experts]; all else runs as it is."""

    def __init__(self, num_experts: int, choose: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._num_experts, self._choose = num_experts, choose
        self.top_ks: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].ndim != 2 or args[0].shape[1] != self._num_experts:
            return result
        self.top_ks.append(result.indices.shape[1])
        ids = self._choose(result.indices)
        return result if ids is result.indices else torch.return_types.topk((args[0].gather(1, ids), ids))


@torch.no_grad()
def _probe(module: PreTrainedModel, seats: Sequence[_Seat]) -> None:
    """Finds in each block the smallest module that makes the choice, by watching one plain forward."""
    watched = {part: seat for seat in seats for part in (*seat.block.children(), seat.block)}
    found: dict[nn.Module, list[int]] = {}

    def watch(part: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with _Answered(watched[part].num_experts, lambda live: live) as answered:
                result = forward(*args, **kwargs)
            found[part] = answered.top_ks
            return result

        return run

    with ExitStack() as stack:
        for part in watched:
            stack.callback(setattr, part, "forward", part.forward)
            part.forward = watch(part, part.forward)
        module(input_ids=torch.zeros(1, 2, dtype=torch.long, device=module.device), use_cache=False)
    for part, seat in watched.items():  # children before their block
        if not seat.top_k and len(found.get(part, ())) == 1:
            seat.router, seat.top_k = part, found[part][0]
    if lost := [seat for seat in seats if not seat.top_k]:
        raise ConfigError(
            f"{type(module).__name__} cannot be replayed: its {type(lost[0].block).__name__} does not choose experts "
            "with one topk; learner.routing=off does without"
        )
