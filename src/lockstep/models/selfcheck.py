"""Run at every load, in well under a second for small models: do our operators compute what plain transformers does?

Architectures known not to fit are refused by name, the rest by measurement: our attention must run exactly once per
layer, packed sequences must score as separate ones do, and chunked, paged decoding must give the same log-probs.
Wrong and silent is the one thing we never are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from lockstep.config import ConfigError
from lockstep.models import paged, varlen
from lockstep.models.few_rows import for_capture, speed_up_few_rows
from lockstep.models.fused import fuse
from lockstep.models.kernels.rehearsal import rehearse
from lockstep.models.kv import PAGE_SIZE, KVCache
from lockstep.models.learner_view import use_learner_view
from lockstep.models.paged import PagedStep, Segment
from lockstep.models.routes import Replay
from lockstep.models.routing import Routers, find_routers, install_routing
from lockstep.models.twins import twin

LENGTHS = (37, 7, 20)  # of the probe sequences; the paged check decodes the last token of each
TIMES = 3  # and that so often over: of more sequences another kernel may read the pages
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.4, torch.float16: 0.05}  # of the spread of a token's logits
RULED_OUT = -1e4  # nats: the model itself masks such a token
SHALLOW = 8  # layers: of a deeper model more is tolerated, as the root of its depth, by which rounding adds up


def self_check(module: PreTrainedModel) -> None:
    """ConfigError naming the model and the reason if it cannot be trained faithfully.

    In a mixture an expert may be chosen by a hair's breadth, and rounding then sends a token elsewhere: what differs
    because of that is no fault, so such a model has a second chance, in which every view is told the same experts.
    """
    name = type(module).__name__
    refuse_by_config(name, module)
    vocab = module.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    probes = [torch.randint(0, vocab, (length,), generator=generator).to(module.device) for length in LENGTHS]
    with torch.inference_mode():
        with suppress(Exception):  # which the check itself tells
            rehearse(lambda: [run(module, probes, None) for run in (_packed_logits, _paged_logits)], module.device)
        reference = [module(input_ids=p[None], use_cache=False).logits[0] for p in probes]
        problem = _problem(module, probes, reference, None)
        if problem is not None and (pinned := _pin(module, probes)) is not None:
            reference, pins = pinned
            problem = _problem(module, probes, reference, pins)
    if problem is not None:
        raise ConfigError(f"{name} cannot be used: {problem}")


@dataclass(frozen=True, slots=True)
class _Pins:
    """The experts that plain transformers chose for the probes."""

    routers: Routers
    ids: list[Tensor]  # [tokens, L, k] of each

    def install(self, view: PreTrainedModel) -> None:
        install_routing(view, self.routers)

    def of(self, rows: Sequence[tuple[int, slice]]) -> Replay:
        """For a forward of these tokens: (probe, which of its tokens)."""
        ids = torch.cat([self.ids[number][span] for number, span in rows])
        return Replay(self.routers, ids, torch.ones(len(ids), dtype=torch.bool, device=ids.device))


@dataclass(frozen=True, slots=True)
class _Call:
    routing: Replay


def _pin(module: PreTrainedModel, probes: list[Tensor]) -> tuple[list[Tensor], _Pins] | None:
    """Logits of plain transformers and the experts it chose; None if there are none, or they cannot be told to it."""
    try:
        routers = find_routers(module)
    except ConfigError:
        return None
    if routers is None:
        return None
    view = twin(module, module.config._attn_implementation or "eager", share=True)
    install_routing(view, routers)
    calls = [_Call(Replay(routers)) for _ in probes]
    logits = [
        view(input_ids=p[None], use_cache=False, lockstep=c).logits[0] for p, c in zip(probes, calls, strict=True)
    ]
    return logits, _Pins(routers, [call.routing.outcome(None).used() for call in calls])


def _problem(module: PreTrainedModel, probes: list[Tensor], reference: list[Tensor], pins: _Pins | None) -> str | None:
    """What is wrong with our views of the model, in words."""
    layers = module.config.get_text_config().num_hidden_layers
    tolerance = TOLERANCE[module.dtype] * max(1.0, layers / SHALLOW) ** 0.5
    for kind, run in (("packed", _packed_logits), ("paged", _paged_logits)):
        try:
            found = run(module, probes, pins)
        except Exception as error:  # an architecture we did not foresee may fail in any way
            return str(error)
        pairs = zip(cycle(reference), found, strict=False)
        worst = max(_distance(a, b) for a, b in pairs)
        if not worst <= tolerance:  # NaN fails too
            return f"{kind} log-probs differ from plain transformers' by {worst:.2g} of their spread"
    return None


def _distance(plain: Tensor, ours: Tensor) -> float:
    """The largest between log-probs [tokens, V], relative to how much a token's differ among themselves: those of a
    trained model do by several times as much as of one with random weights, and so does what rounding makes of them."""
    plain, ours = (x.float().log_softmax(-1) for x in (plain, ours))
    ruled_out = plain < RULED_OUT
    if not torch.equal(ruled_out, ours < RULED_OUT):
        return math.inf
    known = plain.masked_fill(ruled_out, math.nan)
    spread = (known - known.nanmean(-1, keepdim=True)).square().nanmean(-1).sqrt().clamp(min=1e-3)
    return float(((plain - ours).masked_fill(ruled_out, 0.0).abs().amax(-1) / spread).max())


def refuse_by_config(name: str, module: PreTrainedModel) -> None:
    text = module.config.get_text_config()
    reason = _misfit(text)
    if not getattr(module, "_supports_attention_backend", False):
        reason = reason or "its attention cannot be replaced (it does not use transformers' attention interface)"
    if reason:
        raise ConfigError(f"{name} cannot be used: {reason}")


def _misfit(text: PreTrainedConfig) -> str | None:
    kinds = set(getattr(text, "layer_types", None) or ())
    if others := kinds - {"full_attention", "sliding_attention"}:
        return f"it has layers without a per-token key/value memory ({', '.join(sorted(others))})"
    if text.model_type == "qwen2_moe" and "sliding_attention" in kinds:
        return "its sliding window is in a mask that it makes itself: the attention function is not told of it"
    if getattr(text, "num_kv_shared_layers", 0):
        return "it shares keys and values across layers"
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if rope.get("rope_type") in ("longrope", "dynamic"):
        return f"its rotary table ({rope['rope_type']}) depends on the longest request in a batch"
    return None


def _packed_logits(module: PreTrainedModel, probes: list[Tensor], pins: _Pins | None) -> list[Tensor]:
    view = twin(module, varlen.NAME, share=True)
    use_learner_view(view)
    routing = None
    if pins is not None:
        pins.install(view)
        routing = pins.of([(number, slice(None)) for number in range(len(probes))])
    lengths = torch.tensor([0, *LENGTHS], device=module.device)
    context = varlen.Packed(cu_seqlens=lengths.cumsum(0).int(), max_seqlen=max(LENGTHS), routing=routing)
    positions = torch.cat([torch.arange(n, device=module.device) for n in LENGTHS])
    logits = view(
        input_ids=torch.cat(probes)[None], position_ids=positions[None], use_cache=False, lockstep=context
    ).logits[0]
    _require_calls(context.calls, module)
    return list(logits.split(list(LENGTHS)))


def _paged_logits(module: PreTrainedModel, probes: list[Tensor], pins: _Pins | None) -> list[Tensor]:
    """Each probe in three steps: a first chunk, the rest but one, and the last token as a decode step of all probes.

    And all of them again, ending in logits of the same tokens decoded TIMES over, where their pages are dealt out.
    """
    view = twin(module, paged.NAME, share=True)
    fuse(view)
    speed_up_few_rows(view)
    if pins is not None:
        pins.install(view)
    pages = -(-max(LENGTHS) // PAGE_SIZE)
    cache = KVCache(
        module.config, num_pages=pages * len(probes), page_size=PAGE_SIZE, dtype=module.dtype, device=module.device
    )
    tables = torch.arange(pages * len(probes), device=module.device).view(len(probes), pages).flip(0)
    chunks = [[] for _ in probes]
    for number, probe in enumerate(probes):
        for start, end in ((0, 5), (5, len(probe) - 1)):
            span = torch.arange(start, end, device=module.device)
            segment = Segment(
                rows=slice(0, end - start),
                pages=tables[number : number + 1],
                start=span[:1],
                count=torch.tensor([end - start], device=module.device),
                longest=end - start,
            )
            routing = pins.of([(number, slice(start, end))]) if pins is not None else None
            places = tables[number][span // PAGE_SIZE] * PAGE_SIZE + span % PAGE_SIZE
            step = PagedStep(cache=cache, slots=places, segments=[segment], routing=routing)
            chunks[number].append(_paged_forward(view, probe[span], span, step))
    decoded = _decode(view, cache, tables, probes, pins) + _decode(view, cache, tables, probes, pins, times=TIMES)
    return [torch.cat([*chunks[number % len(probes)], logits[None]]) for number, logits in enumerate(decoded)]


def _decode(
    view: PreTrainedModel, cache: KVCache, tables: Tensor, probes: list[Tensor], pins: _Pins | None, times: int = 1
) -> list[Tensor]:
    """Logits of the last token of each probe, so many times over; of several nothing, where they are read like one."""
    numbers = list(range(len(probes))) * times
    last, tables = torch.tensor([len(probes[n]) - 1 for n in numbers], device=tables.device), tables[numbers]
    work = paged.deal(last + 1, cache, view.config.get_text_config().num_attention_heads)
    if times > 1 and work is None:
        return []
    segment = Segment(rows=slice(0, len(numbers)), pages=tables, start=last, work=work)
    places = tables.gather(1, (last // PAGE_SIZE)[:, None])[:, 0] * PAGE_SIZE + last % PAGE_SIZE
    routing = pins.of([(n, slice(-1, None)) for n in numbers]) if pins is not None else None
    step = PagedStep(cache=cache, slots=places, segments=[segment], routing=routing)
    with for_capture({}):  # with the products that captured steps run
        return list(_paged_forward(view, torch.stack([probes[n][-1] for n in numbers]), last, step))


def _paged_forward(view: PreTrainedModel, tokens: Tensor, positions: Tensor, step: PagedStep) -> Tensor:
    logits = view(
        input_ids=tokens[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=torch.arange(len(tokens), device=tokens.device),  # as the engine asks for them
        lockstep=step,
    ).logits[0]
    _require_calls(len(step.calls), view)
    return logits


def _require_calls(calls: int, module: PreTrainedModel) -> None:
    layers = module.config.get_text_config().num_hidden_layers
    if calls != layers:
        raise ValueError(f"Lockstep's attention ran {calls} times in {layers} layers")
