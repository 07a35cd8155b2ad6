"""Engine and learner bit for bit the same, on a GPU: what that asks of a model and of the device.

Products of batch-invariant formats give a row the same bits whatever rows are computed with it, and so do the kernels
between them, element by element. What is left are sums: of attention (`kernels/attention.py`) and of norms, for which
the learner runs the engine's kernels (`learner_view.py`), and of the output layer, which is not low-bit: a product of
our own, and log-probs by the same functions, on both sides (`kernels/output.py`). All of this is of one version of the
weights: an answer that goes on over keys and values of an older one is nobody's to repeat.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from lockstep.config import ConfigError
from lockstep.models import kernels, varlen
from lockstep.models.fused import CAUSAL_LM, FAMILIES
from lockstep.models.head import compute_logits, logits_of
from lockstep.models.kv import Pages, Spans, kv_shape
from lockstep.quant.layers import is_fused_experts


def make_exact(module: PreTrainedModel) -> None:
    """Marks a model whose engine and learner are to compute the same bits; views made from here on see to it.
    ConfigError if it, or its device, cannot be exact."""
    _refuse_inexact(module)
    linear = module.get_output_embeddings()
    assert isinstance(linear, nn.Linear)
    if differing := _differ_on_this_device(module.config.get_text_config(), linear.weight):
        name = torch.cuda.get_device_name(module.device)
        raise ConfigError(f"rollout.exact = true: on {name} {differing}; Lockstep does not know how to be exact there")
    compute_logits(linear, replace(logits_of(linear), exact=True))


def _refuse_inexact(module: PreTrainedModel) -> None:
    """ConfigError if engine and learner would not run the same kernels. float16 has too few small numbers: there a
    power of two does change what is rounded."""
    reason = None
    if module.device.type != "cuda":
        reason = f"a GPU; this model is on {module.device.type!r} (rollout.exact=false does without)"
    elif not kernels.available(module.device):
        reason = "triton, which is not installed"
    elif module.dtype != torch.bfloat16:
        reason = f'learner.dtype = "bfloat16", not {str(module.dtype).removeprefix("torch.")!r}'
    if reason is not None:
        raise ConfigError(f"rollout.exact = true needs {reason}")
    require_exact_architecture(module)


def require_exact_architecture(module: PreTrainedModel) -> None:
    """ConfigError if it has parts that engine and learner do not compute alike. Weights need not be there."""
    name, (_, size, value_size) = type(module).__name__, kv_shape(module.config.get_text_config())
    reason = None
    if any(map(is_fused_experts, module.modules())):
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
def _differ_on_this_device(config: PreTrainedConfig, head: Tensor) -> str | None:
    """What of attention and the output layer depends on how many rows are computed together, if anything does.
    Instructions differ with their number, and that they add up alike is nowhere promised."""
    generator = torch.Generator(head.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=head.device, dtype=head.dtype)

    if not _decode_is_prefill(config, head.device, normal):
        return "attention of one token and of many differ"
    if not _rows_are_alike(head, normal):
        return "products of few rows and of many differ"
    return None


def _decode_is_prefill(config: PreTrainedConfig, device: torch.device, normal: Callable[..., Tensor]) -> bool:
    """The last tokens of so many sequences that none is cut into pieces, of half of them, and of two: other tiles."""
    from lockstep.models.kernels.attention import decode, prefill, uncut

    (heads, size, _), length, page = kv_shape(config), 80, 16
    query = normal(uncut(heads, device) * length, config.num_attention_heads, size)
    keys, values = normal(2, len(query) // page, page, heads, size)
    pages, table = Pages(keys, values, None, None), torch.arange(len(keys), device=device).view(-1, length // page)
    lengths = table.new_full((len(table),), length)
    spans = Spans.of(torch.zeros_like(lengths), lengths)
    given = query, pages, table, spans, length, size**-0.5, None
    many = prefill(*given, exact=True)
    last, expected = (x[length - 1 :: length].contiguous() for x in (query, many))
    batches = (slice(0, count) for count in (len(table), len(table) // 2, 2))
    found = (decode(last[b], pages, table[b], lengths[b], size**-0.5, None, exact=True) for b in batches)
    alike = all(torch.equal(one, expected[: len(one)]) for one in found)
    return alike and torch.allclose(many, prefill(*given), atol=2e-2, rtol=2e-2)  # which was held against transformers


def _rows_are_alike(head: Tensor, normal: Callable[..., Tensor]) -> bool:
    from lockstep.models.kernels.output import WARPS, linear

    rows, weight = normal(max(WARPS), head.shape[1]), head[:1024].contiguous()
    whole, plain = linear(rows, weight, None, torch.float32), rows.float() @ weight.float().T
    alike = all(torch.equal(linear(rows[:count], weight, None, torch.float32), whole[:count]) for count in WARPS)
    return alike and bool((whole - plain).abs().max() <= 1e-3 * plain.abs().max())
