"""Run at every load, in well under a second for small models: do our operators compute what plain transformers does?

Architectures known not to fit are refused by name, the rest by measurement: our attention must run exactly once per
layer, packed sequences must score as separate ones do, and chunked, paged decoding must give the same log-probs.
Wrong and silent is the one thing we never are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from lockstep.config import ConfigError
from lockstep.models import paged, varlen
from lockstep.models.fused import fuse
from lockstep.models.kv import KVCache
from lockstep.models.paged import PagedStep, Segment
from lockstep.models.twins import twin

LENGTHS = (19, 7, 12)  # of the probe sequences; the paged check decodes the last token of each
PAGE_SIZE = 8
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}  # nats, largest seen times ten or so


def self_check(module: PreTrainedModel) -> None:
    """ConfigError naming the model and the reason if it cannot be trained faithfully."""
    name = type(module).__name__
    refuse_by_config(name, module)
    vocab = module.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    probes = [torch.randint(0, vocab, (length,), generator=generator).to(module.device) for length in LENGTHS]
    with torch.inference_mode():
        reference = [module(input_ids=p[None], use_cache=False).logits[0].float().log_softmax(-1) for p in probes]
        views = {"packed": _packed_logp, "paged": _paged_logp}
        for kind, run in views.items():
            try:
                found = run(module, probes)
            except Exception as error:  # an architecture we did not foresee may fail in any way
                raise ConfigError(f"{name} cannot be used: {error}") from error
            _compare(name, kind, module.dtype, reference, found)


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


def _packed_logp(module: PreTrainedModel, probes: list[Tensor]) -> list[Tensor]:
    view = twin(module, varlen.NAME, share=True)
    lengths = torch.tensor([0, *LENGTHS], device=module.device)
    context = varlen.Packed(cu_seqlens=lengths.cumsum(0).int(), max_seqlen=max(LENGTHS))
    positions = torch.cat([torch.arange(n, device=module.device) for n in LENGTHS])
    logits = view(
        input_ids=torch.cat(probes)[None], position_ids=positions[None], use_cache=False, lockstep=context
    ).logits[0]
    _require_calls(context.calls, module)
    return list(logits.float().log_softmax(-1).split(list(LENGTHS)))


def _paged_logp(module: PreTrainedModel, probes: list[Tensor]) -> list[Tensor]:
    """Each probe in three steps: a first chunk, the rest but one, and the last token as a decode step of all probes."""
    view = twin(module, paged.NAME, share=True)
    fuse(view)
    pages = -(-max(LENGTHS) // PAGE_SIZE)
    cache = KVCache(
        module.config, num_pages=pages * len(probes), page_size=PAGE_SIZE, dtype=module.dtype, device=module.device
    )
    tables = torch.arange(pages * len(probes), device=module.device).view(len(probes), pages).flip(0)
    parts = [[] for _ in probes]
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
            parts[number].append(
                _paged_forward(view, cache, probe[span], span, tables[number][span // PAGE_SIZE], [segment])
            )
    last = torch.tensor([len(p) - 1 for p in probes], device=module.device)
    decode = Segment(rows=slice(0, len(probes)), pages=tables, start=last)
    tokens = torch.stack([p[-1] for p in probes])
    pages_of_last = tables.gather(1, (last // PAGE_SIZE)[:, None])[:, 0]
    for number, logits in enumerate(_paged_forward(view, cache, tokens, last, pages_of_last, [decode])):
        parts[number].append(logits[None])
    return [torch.cat(p).float().log_softmax(-1) for p in parts]


def _paged_forward(
    view: PreTrainedModel, cache: KVCache, tokens: Tensor, positions: Tensor, pages: Tensor, segments: list[Segment]
) -> Tensor:
    step = PagedStep(cache=cache, slots=pages * PAGE_SIZE + positions % PAGE_SIZE, segments=segments)
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


def _compare(name: str, kind: str, dtype: torch.dtype, reference: list[Tensor], found: list[Tensor]) -> None:
    worst = max(float((a - b).abs().max()) for a, b in zip(reference, found, strict=True))
    if not worst <= TOLERANCE[dtype]:  # NaN fails too
        raise ConfigError(f"{name} cannot be used: {kind} log-probs differ from plain transformers by {worst:.3g} nats")
