"""Engine and learner bit for bit the same, on a GPU: what that asks of a model, and the learner's part in it.

Products of batch-invariant formats give a row the same bits whatever rows are computed with it, and so do the kernels
between them, element by element. What is left are sums: of attention (`kernels/attention.py`, `varlen.EXACT`), and of
norms, for which the learner runs the engine's kernel. The output layer is not low-bit: there the order of sums remains,
and is seen in log-probs, but nowhere else.
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
    """ConfigError if engine and learner would not run the same kernels."""
    _, size, value_size = kv_shape(module.config.get_text_config())
    reason = None
    if not kernels.available(module.device) or module.device.type != "cuda":
        reason = f"a GPU; this model is on {module.device.type!r}"
    elif module.dtype not in (torch.bfloat16, torch.float16):
        reason = f"learner.dtype to be bfloat16 or float16, not {str(module.dtype).removeprefix('torch.')}"
    elif type(module).__name__ not in CAUSAL_LM:
        reason = f"a model of {', '.join(FAMILIES)}; this one is {type(module).__name__}"
    elif any(map(is_fused_experts, module.modules())):
        reason = f"a dense model: the routers of {type(module).__name__} are not low-bit"
    elif size != value_size or not kernels.attends(size):
        reason = f"heads whose size is a power of two; those of {type(module).__name__} have {size}"
    if reason is not None:
        raise ConfigError(f"rollout.exact = true needs {reason}")


def learn_exactly(module: PreTrainedModel) -> None:
    """Makes the learner's module sum up as the engine does."""
    use_attention(module, varlen.EXACT)
    for part in module.modules():
        if type(part).__name__ in NORM:
            part.forward = partial(_norm, part)


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
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
