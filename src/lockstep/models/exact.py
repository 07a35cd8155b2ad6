"""Engine and learner bit for bit the same, on a GPU: what that asks of a model, and the learner's part in it.

Products of batch-invariant formats give a row the same bits whatever rows are computed with it, and so do the kernels
between them, element by element. What is left are sums: of attention (`kernels/attention.py`, `varlen.EXACT`), and of
norms, for which the learner runs the engine's kernel. The output layer is not low-bit: there the order of sums remains,
and is seen in log-probs, but nowhere else. All of this is of one version of the weights: an answer that goes on over
keys and values of an older one is nobody's to repeat.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.config import ConfigError
from lockstep.models import kernels, varlen
from lockstep.models.fused import CAUSAL_LM, FAMILIES, NORM
from lockstep.models.kv import kv_shape
from lockstep.models.twins import use_attention
from lockstep.quant.layers import is_fused_experts


def refuse_inexact(module: PreTrainedModel) -> None:
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


def learn_exactly(module: PreTrainedModel) -> None:
    """Makes the learner's module sum up as the engine does; ConfigError if it cannot."""
    refuse_inexact(module)
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
        from lockstep.models.kernels.pointwise import rms_norm

        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        normed = rms_norm(x, weight, eps)
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
