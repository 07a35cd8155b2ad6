"""Engine and learner bit for bit the same, on a GPU: what that asks of a model, and the learner's part in it.

Products of batch-invariant formats give a row the same bits whatever rows are computed with it, and so do the kernels
between them, element by element. What is left are sums: of attention (`kernels/attention.py`, `varlen.EXACT`), of
norms, for which the learner runs the engine's kernel, and of the output layer, which is not low-bit: a product of our
own, and log-probs by one kernel, on both sides (`kernels/output.py`). All of this is of one version of the weights: an
answer that goes on over keys and values of an older one is nobody's to repeat.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from lockstep.config import ConfigError
from lockstep.models import kernels, varlen
from lockstep.models.fused import CAUSAL_LM, FAMILIES, NORM
from lockstep.models.head import compute_logits, is_exact, logits_of
from lockstep.models.kv import Pages, kv_shape
from lockstep.models.twins import use_attention
from lockstep.quant.layers import is_fused_experts


def make_exact(module: PreTrainedModel) -> None:
    """Every view of it that is made from here on: the engine's needs no more. ConfigError if it cannot be."""
    _refuse_inexact(module)
    if differing := _differ_on_this_device(module):
        name = torch.cuda.get_device_name(module.device)
        raise ConfigError(f"rollout.exact = true: on {name} {differing}; Lockstep does not know how to be exact there")
    linear = module.get_output_embeddings()
    assert isinstance(linear, nn.Linear)
    compute_logits(linear, replace(logits_of(linear), exact=True))


def _refuse_inexact(module: PreTrainedModel) -> None:
    """ConfigError if engine and learner would not run the same kernels. float16 has too few small numbers: there a
    power of two does change what is rounded."""
    name, (_, size, value_size) = type(module).__name__, kv_shape(module.config.get_text_config())
    reason = None
    if module.device.type != "cuda":
        reason = f"a GPU; this model is on {module.device.type!r} (rollout.exact=false does without)"
    elif not kernels.available(module.device):
        reason = "triton, which is not installed"
    elif module.dtype != torch.bfloat16:
        reason = f'learner.dtype = "bfloat16", not {str(module.dtype).removeprefix("torch.")!r}'
    elif any(map(is_fused_experts, module.modules())):
        reason = f"a dense model: the routers of {name} are not low-bit"
    elif name not in CAUSAL_LM:
        dense = [family for family in FAMILIES if not family.endswith(("Moe", "Mixtral"))]
        reason = f"a model of {', '.join(dense)}; this one is {name}"
    elif size != value_size or not varlen.follows_engine(size):
        sizes = f"keys and values of one size, a power of two from 16 to {varlen.LARGEST_HEAD}"
        reason = f"{sizes}; those of {name} have {size} and {value_size}"
    if reason is not None:
        raise ConfigError(f"rollout.exact = true needs {reason}")


@torch.inference_mode()
def _differ_on_this_device(module: PreTrainedModel) -> str | None:
    """What depends on how many are computed together, if anything does. Instructions differ with the number of rows,
    and that they add up alike is nowhere promised."""
    generator = torch.Generator(module.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=module.device, dtype=module.dtype)

    if not _decode_is_prefill(module.config.get_text_config(), normal):
        return "attention of one token and of many differ"
    if not _rows_are_alike(module.get_output_embeddings().weight, normal):  # type: ignore[union-attr]
        return "products of few rows and of many differ"
    return None


def _decode_is_prefill(config: PreTrainedConfig, normal: Callable[..., Tensor]) -> bool:
    """The last tokens of many sequences, and of two: other tiles, and cut into pieces."""
    from lockstep.models.kernels.attention import decode, prefill

    (heads, size, _), queries, sequences, length, page = kv_shape(config), config.num_attention_heads, 96, 144, 16
    keys, values = normal(2, sequences * length // page, page, heads, size)
    pages = Pages(keys, values, None, None)
    query = normal(sequences * length, queries, size)
    table = torch.arange(len(keys), device=query.device).view(sequences, -1)
    lengths = table.new_full((sequences,), length)
    many = prefill(query, pages, table, torch.zeros_like(lengths), lengths, length, size**-0.5, None, exact=True)
    last, expected = (x[length - 1 :: length].contiguous() for x in (query, many))
    batches = (slice(0, sequences), slice(0, 2))
    found = (decode(last[b], pages, table[b], lengths[b], size**-0.5, None, exact=True) for b in batches)
    return all(torch.equal(one, expected[: len(one)]) for one in found)


def _rows_are_alike(weight: Tensor, normal: Callable[..., Tensor]) -> bool:
    from lockstep.models.kernels.output import WARPS, linear

    rows, some = normal(max(WARPS), weight.shape[1]), weight[:1024].contiguous()
    whole = linear(rows, some, None, torch.float32)
    return all(torch.equal(linear(rows[:count], some, None, torch.float32), whole[:count]) for count in WARPS)


def learn_exactly(module: PreTrainedModel) -> None:
    """Makes the learner's module, which is exact, sum up as the engine does."""
    assert is_exact(module)
    use_attention(module, varlen.EXACT)
    for part in module.modules():
        if type(part).__name__ in NORM:
            part.forward = partial(_rms_norm, part)


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    return _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)


class _RMSNorm(torch.autograd.Function):
    """y = weight · x / rms(x), by the engine's kernel; dx = s·(g − n·mean(g·n)) with n = s·x and g = weight·dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from lockstep.models.kernels.pointwise import Exact

        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        normed = Exact.rms_norm(x, weight, eps)
        assert isinstance(normed, Tensor)
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + ctx.eps)
        normed, dy = x.float() * scale, grads[0].float()
        g = dy * weight.float()
        dx = scale * (g - normed * (g * normed).mean(-1, keepdim=True))
        return dx.to(x.dtype), (dy * normed).flatten(0, -2).sum(0).to(weight.dtype), None
