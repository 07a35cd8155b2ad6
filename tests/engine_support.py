"""Small engines for tests, and the plain forward pass they are compared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.models import kv
from lockstep.models.engine_view import engine_view
from lockstep.models.lowbit import LowBitWeights
from lockstep.models.releasable import Releasable
from lockstep.models.routing import find_routers
from lockstep.models.tiny import SPECIALS, TinyModel, byte_tokenizer, tiny_model
from lockstep.rollout.config import RolloutConfig
from lockstep.rollout.core import EngineCore
from lockstep.types import Completion, Request, SamplingParams

END = 256 + SPECIALS.index("<|end|>")
TOLERANCE = 1e-4  # nats


def sharpen(module: PreTrainedModel, seed: int = 0, std: float = 0.2) -> PreTrainedModel:
    """Random weights large enough that a distribution is not flat: a wrong key or position then shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.normal(0.0, std, parameter.shape, generator=generator))
    return module.eval()


def small(*, experts: int = 0, context: int = 128, seed: int = 0) -> PreTrainedModel:
    return sharpen(tiny_model(TinyModel(hidden=32, layers=2, heads=4, context=context, experts=experts), seed), seed)


def engine_core(
    module: PreTrainedModel,
    *,
    pages: int | None = None,
    end: Sequence[int] = (),
    record: bool = False,
    share: bool = False,
    low_bit: LowBitWeights | None = None,
    **config: Any,
) -> EngineCore:
    """An engine on its own copy of the weights, or with `share` on the module's; `pages` is how much memory it has,
    `record` is for expert routes, `low_bit` takes the place of matrices."""
    if pages is not None:
        text = module.config.get_text_config()
        heads, key, value = kv.kv_shape(text)
        page_bytes = text.num_hidden_layers * kv.PAGE_SIZE * heads * (key + value) * module.dtype.itemsize + 64 * record
        config["kv_gib"] = (pages + 0.5) * page_bytes / 2**30
    routers = find_routers(module) if record else None
    memory = Releasable(module.device) if config.get("sleep") else None
    view = engine_view(module, share=share, low_bit=low_bit, routers=routers, memory=memory)
    return EngineCore(view, byte_tokenizer(), end, RolloutConfig(**config), routers, memory)


def prompt(length: int, seed: int, vocab: int = 256) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, vocab, (length,), generator=generator).tolist())


def ask(uid: str, tokens: Iterable[int], max_tokens: int = 12, **params: Any) -> Request:
    """Greedy unless said otherwise."""
    params = {"temperature": 0.0, **params}
    return Request(uid=uid, tokens=tuple(tokens), params=SamplingParams(max_tokens=max_tokens, **params))


def finish(core: EngineCore, requests: Sequence[Request] = (), limit: int = 2000) -> dict[str, Completion]:
    """Runs the engine until it is idle."""
    for request in requests:
        core.check(request)
    core.add(requests)
    done: list[Completion] = []
    while core.busy:
        done += core.step()
        limit -= 1
        assert limit, "the engine does not come to an end"
    assert len({c.uid for c in done}) == len(done)
    return {c.uid: c for c in done}


@torch.inference_mode()
def full_logp(module: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """[T, V]: row t is the distribution of token t+1, by the model's own attention over the whole sequence."""
    return module(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].float().log_softmax(-1)


def rescore(module: PreTrainedModel, request: Request, completion: Completion) -> Tensor:
    """The log-probs a full forward gives to the sampled tokens."""
    logp = full_logp(module, [*request.tokens, *completion.tokens])[len(request.tokens) - 1 : -1]
    return logp.gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]


def assert_scored(module: PreTrainedModel, requests: Sequence[Request], done: Mapping[str, Completion]) -> None:
    for request in requests:
        completion = done[request.uid]
        torch.testing.assert_close(
            torch.tensor(completion.logp), rescore(module, request, completion), atol=TOLERANCE, rtol=0
        )


@torch.inference_mode()
def greedy(module: PreTrainedModel, request: Request, end: Sequence[int] = ()) -> list[int]:
    """What `transformers.generate` answers, up to and including an end token."""
    tokens = torch.tensor([request.tokens])
    options: dict[str, Any] = {"eos_token_id": list(end)} if end else {"eos_token_id": None}
    out = module.generate(  # pyright: ignore[reportCallIssue]
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        max_new_tokens=request.params.max_tokens,
        pad_token_id=0,
        **options,
    )
    return out[0, len(request.tokens) :].tolist()
