"""The one seam for the routers of a mixture of experts: whoever runs a forward may see, or decide, who is chosen.

Every router of transformers scores the experts and picks some with one `torch.topk` over [tokens, experts]; then it
weighs them by a rule of its own (softmax before or after, normalised or not, sigmoid and bias). So its own forward runs
and only that call is answered for it: recorded ids in place of the live ones. The weight rule then works on the logits
of this very forward, and the router keeps its gradient (R3, Eq. 8), whatever the architecture.

A forward's routes travel with its argument `lockstep`, never through a global: each decoder layer binds its router to
the call under way, also when activation checkpointing calls it again, long after other forwards have run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from lockstep.config import ConfigError
from lockstep.models.twins import twin

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # as configurations name it


class Routing(Protocol):
    """What a forward does with the routers' choices. Its argument `lockstep` carries one, or None: live routing."""

    decides: bool  # `choose` may answer with others; if not, `note` is called in its place where that is possible

    def choose(self, number: int, live: Tensor, scores: Tensor) -> Tensor:
        """Expert ids [tokens, top-k] to use, given those the router picks now by `scores` [tokens, experts].

        `number` counts the layers that have experts, from 0.
        """
        ...

    def note(self, number: int, ids: Tensor) -> None:
        """The expert ids that a router chose by itself. A router is slowed down by being asked, not by being read."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Routers:
    """Where the routers of a model are, and what they choose from."""

    layers: tuple[str, ...]  # names of the decoder layers with experts: dense ones between them do not count
    modules: tuple[str, ...]  # in each, the smallest module that makes the choice
    num_experts: int
    top_k: int
    output: int | None = None  # where in its result a router hands on the ids it runs; None: it keeps them to itself

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def dtype(self) -> torch.dtype:
        """What an expert id is kept in."""
        return torch.uint8 if self.num_experts <= 256 else torch.int16  # torch can do little with uint16


def find_routers(module: PreTrainedModel) -> Routers | None:
    """Of a model as it was loaded; None if it is dense. ConfigError if its routes could not be replayed faithfully.

    That is measured on a few tokens: every router chooses once, its own choice replayed gives the very same logits, and
    any other experts give other ones.
    """
    view = _copy(module)
    blocks = {layer: block for layer in decoder_layers(view) if (block := _moe_block(layer))}
    if not blocks:
        if named := [name for name in NUM_EXPERTS if (getattr(view.config.get_text_config(), name, 0) or 0) > 1]:
            raise _refused(module, f"its configuration has {named[0]}, but no layer has a part called experts")
        return None
    if unknown := [block for block, size in blocks.values() if size is None]:
        raise _refused(module, f"{_contents(unknown[0])}; supported are a list of modules and weights [experts, …, …]")
    sizes = {block: size for block, size in blocks.values() if size is not None}
    choices, num_choices = _watch(view, sizes)
    if num_choices > len(blocks):
        raise _refused(module, f"{num_choices} choices of experts in a forward, of which {len(blocks)} can be followed")
    choosers = [_chooser(view, block, choices) for block in sizes]
    kinds = {(size, *choices[part]) for size, part in zip(sizes.values(), choosers, strict=True)}
    if len(kinds) > 1:
        raise _refused(module, f"its layers choose differently: {sorted(kinds)} (experts, top-k)")
    names = {child: name for name, child in view.named_modules()}
    num_experts, top_k = kinds.pop()
    routers = Routers(
        layers=tuple(names[layer] for layer in blocks),
        modules=tuple(names[part] for part in choosers),
        num_experts=num_experts,
        top_k=top_k,
    )
    return replace(routers, output=_prove(module, routers))


def install_routing(view: PreTrainedModel, routers: Routers) -> None:
    """Makes a view's routers obey `lockstep.routing`. Before its layers are checkpointed: what is wrapped must be what
    a recomputation repeats."""
    for number, (layer, router) in enumerate(zip(routers.layers, routers.modules, strict=True)):
        _Seat(number, routers).install(view.get_submodule(layer), view.get_submodule(router))


def decoder_layers(module: PreTrainedModel) -> list[nn.Module]:
    """The blocks that transformers itself says must stay whole."""
    names = set(module._no_split_modules or ())
    layers = [child for child in module.modules() if type(child).__name__ in names]
    if not layers:
        raise ValueError(f"{type(module).__name__} names no decoder layers, so it cannot be sharded or checkpointed")
    return layers


def _moe_block(layer: nn.Module) -> tuple[nn.Module, int | None] | None:
    """The part of a layer that holds `experts`, and how many there are; None: they are not stacked along one axis."""
    for part in layer.modules():
        experts = getattr(part, "experts", None)
        if isinstance(experts, nn.ModuleList):
            return part, len(experts)
        if isinstance(experts, nn.Module):
            return part, next((p.shape[0] for p in experts.parameters() if p.ndim == 3), None)
    return None


def _contents(block: nn.Module) -> str:
    """How it keeps its experts, in words."""
    experts = block.get_submodule("experts")
    weights = [f"{name} {list(weight.shape)}" for name, weight in experts.named_parameters()]
    first = weights[0] if weights else "nothing"
    return f"the experts of {type(block).__name__} are {type(experts).__name__}, with {first} of {len(weights)} weights"


class _Seat:
    """A router in its layer, and the call it works for."""

    def __init__(self, number: int, routers: Routers) -> None:
        self.number, self.routers = number, routers
        self.current: Routing | None = None

    def install(self, layer: nn.Module, router: nn.Module) -> None:
        """The layer binds, the router obeys. Wrapped are `forward`s, not calls: checkpointing repeats those."""
        router.forward = partial(self._run_router, router.forward)
        layer.forward = partial(self._run_layer, layer.forward)

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
        if self.routers.output is not None and not self.current.decides:
            result = forward(*args, **kwargs)
            self.current.note(self.number, result[self.routers.output])
            return result
        with _Answered(self.routers.num_experts, partial(self.current.choose, self.number)) as answered:
            result = forward(*args, **kwargs)
        assert answered.top_ks == [self.routers.top_k], "a router must choose once"
        return result


class _Answered(TorchFunctionMode):
    """Lets `choose(live, scores)` answer every topk over [tokens, experts]; all else runs as it is."""

    def __init__(self, num_experts: int, choose: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self._num_experts, self._choose = num_experts, choose
        self.top_ks: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].ndim != 2 or args[0].shape[1] != self._num_experts:
            return result
        self.top_ks.append(result.indices.shape[1])
        ids = self._choose(result.indices, args[0])
        return result if ids is result.indices else torch.return_types.topk((args[0].gather(1, ids), ids))


def _copy(module: PreTrainedModel) -> PreTrainedModel:
    """To be taken apart: the same weights in modules of their own."""
    return twin(module, module.config._attn_implementation or "eager", share=True)


@torch.inference_mode()
def _watch(view: PreTrainedModel, num_experts: Mapping[nn.Module, int]) -> tuple[dict[nn.Module, list[int]], int]:
    """The top-k of every choice that a block, or a child of it, makes in one plain forward; and how many choices there
    are in all, wherever they are made."""
    choices: dict[nn.Module, list[int]] = {}

    def watched(part: nn.Module, size: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _Answered(size, lambda live, scores: live) as answered:
            result = forward(*args, **kwargs)
        choices[part] = answered.top_ks
        return result

    for block, size in num_experts.items():
        for part in (block, *block.children()):
            part.forward = partial(watched, part, size, part.forward)
    with ExitStack() as everywhere:
        seen = [everywhere.enter_context(_Answered(size, lambda live, _: live)) for size in set(num_experts.values())]
        view(input_ids=_probe_tokens(view), use_cache=False)
    return choices, sum(len(answered.top_ks) for answered in seen)


def _chooser(view: PreTrainedModel, block: nn.Module, choices: Mapping[nn.Module, list[int]]) -> nn.Module:
    """A child if it makes the choice, else the block itself."""
    for part in (*block.children(), block):
        if len(choices.get(part, ())) == 1:
            return part
    found = len(choices.get(block, ()))
    raise _refused(view, f"{type(block).__name__} chooses its experts with {found} calls of topk; supported is one")


def _probe_tokens(module: PreTrainedModel) -> Tensor:
    vocab = module.config.get_text_config().vocab_size
    return (torch.arange(1, 9, device=module.device) * 7919 % vocab)[None]


class _Probe:
    """A forward that answers every router by a rule and keeps the answers, by layer."""

    decides = True

    def __init__(self, rule: Callable[[int, Tensor, Tensor], Tensor]) -> None:
        self._rule = rule
        self.ids: dict[int, Tensor] = {}

    @property
    def routing(self) -> Routing:
        return self

    def choose(self, number: int, live: Tensor, scores: Tensor) -> Tensor:
        self.ids[number] = self._rule(number, live, scores)
        return self.ids[number]

    def note(self, number: int, ids: Tensor) -> None:
        raise AssertionError("a probe decides")


def _unlikely(spare: int) -> _Probe:
    """The experts a router would choose last, but for the very last `spare`."""
    return _Probe(lambda _, live, scores: scores.argsort(dim=-1)[:, spare : spare + live.shape[1]])


@torch.inference_mode()
def _prove(module: PreTrainedModel, routers: Routers) -> int | None:
    """Returns `Routers.output`, or refuses.

    A router that weighs experts by scores it has masked (group-limited, as some of DeepSeek-V2) gives those outside of
    its own groups no weight, so that unlikely experts are all the same to it: not its rule on what was recorded.
    """
    view = _copy(module)
    install_routing(view, routers)
    results = _results(view, routers)

    def logits(probe: _Probe) -> Tensor:
        return view(input_ids=_probe_tokens(view), use_cache=False, lockstep=probe).logits

    own, last = _Probe(lambda _, live, scores: live), _unlikely(0)
    live = logits(own)
    if len(own.ids) != routers.num_layers:
        raise _refused(module, f"{len(own.ids)} of {routers.num_layers} layers hand down what they are called with")
    if not torch.equal(logits(_Probe(lambda number, *_: own.ids[number].clone())), live):
        raise _refused(module, "the routers' own choice, replayed, gives other logits")
    if routers.top_k < routers.num_experts and torch.equal(logits(_unlikely(1)), logits(last)):
        _tell_experts_apart(view.get_submodule(routers.layers[0]))  # all may be one, as where a dense model became many
        if torch.equal(logits(_unlikely(1)), logits(last)):
            raise _refused(module, "its routers give no weight to experts that they would not choose themselves")
    return _output(results, last.ids or own.ids)


def _tell_experts_apart(layer: nn.Module) -> None:
    """Gives every expert of a view's layer weights of its own that have nothing to do with the model's."""
    found = _moe_block(layer)
    assert found is not None
    for parameter in found[0].get_submodule("experts").parameters():
        generator = torch.Generator(parameter.device).manual_seed(0)
        parameter.data = torch.empty_like(parameter).normal_(std=0.02, generator=generator)


def _results(view: PreTrainedModel, routers: Routers) -> dict[int, Any]:
    """Filled, by layer, with what the routers returned in the latest forward."""
    results: dict[int, Any] = {}
    for number, name in enumerate(routers.modules):
        view.get_submodule(name).register_forward_hook(
            lambda module, args, result, number=number: results.update({number: result})
        )
    return results


def _output(results: Mapping[int, Any], ids: Mapping[int, Tensor]) -> int | None:
    """Where in all results the ids stand that were told in that forward."""
    if not all(isinstance(result, tuple) for result in results.values()):
        return None
    places = range(min(len(result) for result in results.values()))
    return next((i for i in places if all(_same(results[number][i], told) for number, told in ids.items())), None)


def _same(found: object, told: Tensor) -> bool:
    return isinstance(found, Tensor) and torch.equal(found, told)


def _refused(module: PreTrainedModel, reason: str) -> ConfigError:
    return ConfigError(f"the expert routes of {type(module).__name__} cannot be replayed: {reason}")
