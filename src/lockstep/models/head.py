"""Output layers: how logits are computed, and the learner's, which gives log-probs without ever holding all of them.

`install_head` puts it in `lm_head`'s place with the same parameters (tied ones stay tied). The model is still called
as a whole, so FSDP2 sees every forward; only the rows asked for are computed, chunk by chunk, and computed again in
backward. What the model itself does to its logits (softcap, scale) moves into the head.

Shapes: R rows asked for, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from lockstep.config import ConfigError
from lockstep.models import kernels

CHUNK_ELEMENTS = {"cpu": 2**21, "cuda": 2**27}  # logits held at once: cache-sized on a CPU, launch-bound on a GPU
MIN_ROWS = 256  # every chunk reads and adds to the whole weight once, which fewer rows do not pay for


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """logits = softcap · tanh(scale · raw / softcap), the cap optional."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, raw: Tensor) -> Tensor:
        """In float32 whatever the model's dtype, as the sampler's log-probs are."""
        z = raw.float() * self.scale
        return z if self.softcap is None else (z / self.softcap).tanh() * self.softcap

    def slope(self, z: Tensor) -> Tensor | float:
        """d logits / d raw, from the transformed logits."""
        return self.scale if self.softcap is None else self.scale * (1 - (z / self.softcap) ** 2)


@dataclass(frozen=True, slots=True)
class Logits:
    """How an output layer computes them: plainly, they are rounded to the model's dtype."""

    float32: bool = False
    """Not rounded. In bfloat16 a logit of 10 is rounded to the nearest 1/16: what differs ever so little between
    sampler and learner becomes a step of that size, or nothing."""

    exact: bool = False
    """On a GPU, a row's are the same bits whatever rows are computed with it, and so are its log-probs. It marks a
    model of which every view is to be exact (`models/exact.py`)."""

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.exact:
            from lockstep.models.kernels import output

            return output.linear(input, weight, bias, torch.float32 if self.float32 else input.dtype)
        return float32_linear(input, weight, bias) if self.float32 else F.linear(input, weight, bias)


class OutputLayer(nn.Linear):
    """One whose logits are computed otherwise than plainly. In the place of a model's own, every view of the model
    that is made from there on has it."""

    logits: Logits

    def forward(self, input: Tensor) -> Tensor:
        return self.logits(input, self.weight, self.bias)


def float32_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` without the last rounding: both sum up in float32."""
    if input.device.type != "cuda":  # has no such product
        return F.linear(input.float(), weight.float(), None if bias is None else bias.float())
    raw = torch.mm(input.flatten(0, -2), weight.T, out_dtype=torch.float32).unflatten(0, input.shape[:-1])
    return raw if bias is None else raw + bias


def logits_of(linear: nn.Linear) -> Logits:
    return linear.logits if isinstance(linear, OutputLayer) else Logits()


def is_exact(module: PreTrainedModel) -> bool:
    """Whether `make_exact` was called for it."""
    linear = module.get_output_embeddings()
    return isinstance(linear, nn.Linear) and logits_of(linear).exact


def keep_logits(module: PreTrainedModel) -> None:
    """Logits are not rounded, in every view of the model that is made from here on. On a CPU that takes long: it has
    no such product of bfloat16."""
    linear = module.get_output_embeddings()
    if isinstance(linear, nn.Linear) and linear.weight.dtype == torch.float32:
        return
    if type(linear) is not nn.Linear:
        raise ConfigError(f"model.float32_logits needs a linear output layer; this one is {type(linear).__name__}")
    compute_logits(linear, Logits(float32=True))


def compute_logits(linear: nn.Linear, logits: Logits) -> None:
    """Makes an output layer compute them so. It keeps its parameters, tied or not."""
    linear.__class__ = OutputLayer
    linear.logits = logits  # type: ignore[assignment]


class LogProbHead(nn.Module):
    """Inside `scoring(…)` the forward gives [1, R, 2 or 3]: log-prob, entropy and, with a value head, the value.

    Outside it gives plain logits, as the layer it replaces. Entropy is for looking at: it carries no gradient.
    """

    bias: nn.Parameter | None  # [V]

    def __init__(self, linear: nn.Linear, transform: LogitTransform, with_value: bool) -> None:
        super().__init__()
        self.weight = linear.weight  # [V, D]
        self.register_parameter("bias", linear.bias)
        self.logits = logits_of(linear)
        self.transform = transform
        assert not self.logits.exact or transform == LogitTransform(), "the kernel of log-probs knows none"
        self.value = _zero_linear(linear) if with_value else None
        self._request: tuple[Tensor, Tensor, float] | None = None

    @contextmanager
    def scoring(self, rows: Tensor, targets: Tensor, temperature: float) -> Iterator[None]:
        """The next forward scores `targets` [R] as the tokens that follow positions `rows` [R]."""
        self._request = (rows, targets, temperature)
        try:
            yield
        finally:
            self._request = None

    def forward(self, hidden: Tensor) -> Tensor:
        if self._request is None:
            raw = self.logits(hidden, self.weight, self.bias)
            return self.transform(raw).to(raw.dtype)
        rows, targets, temperature = self._request
        hidden = hidden.squeeze(0).index_select(0, rows)
        arguments = hidden, self.weight, self.bias, targets, temperature, self.transform, self.logits
        outputs = list(_ChunkedLogProb.apply(*arguments))
        if self.value is not None:
            outputs.append(self.value(hidden).squeeze(-1).float())
        return torch.stack(outputs, dim=-1).unsqueeze(0)


class _ChunkedLogProb(torch.autograd.Function):
    """log softmax(z / T)[target] and its entropy, row by row; backward recomputes each chunk's logits from `lse`."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        W: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        T: float,
        transform: LogitTransform,
        logits: Logits,
    ) -> tuple[Tensor, Tensor]:
        logp, lse, entropy = h.new_empty((3, len(h)), dtype=torch.float32)
        log_probs = _log_probs(transform, h.device)
        for s in _chunks(h, W):
            logp[s], lse[s], entropy[s] = log_probs(logits(h[s], W, bias), targets[s], T)
        ctx.save_for_backward(h, W, bias, targets, lse)
        ctx.T, ctx.transform, ctx.logits = T, transform, logits
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        h, W, bias, targets, lse = ctx.saved_tensors
        grad_h, grad_W = torch.empty_like(h), torch.zeros_like(W, dtype=torch.float32)
        grad_b = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        gradients = _gradients(ctx.transform, h.device)
        for s in _chunks(h, W):
            grad_z = gradients(ctx.logits(h[s], W, bias), targets[s], lse[s], grads[0][s], ctx.T, h.dtype)
            if grad_b is not None:
                grad_b += grad_z.sum(0, dtype=torch.float32)
            torch.mm(grad_z, W, out=grad_h[s])
            _add_outer(grad_W, grad_z, h[s])
        return grad_h, grad_W.to(W.dtype), None if grad_b is None else grad_b.to(h.dtype), *(None,) * 4


def _log_probs(transform: LogitTransform, device: torch.device) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """(raw logits, targets, T) to (log-probs, logs of the sums of exponentials, entropies)."""
    if not _has_kernels(transform, device):
        return partial(_plain_log_probs, transform)
    from lockstep.models.kernels.output import log_probs

    return log_probs


def _gradients(transform: LogitTransform, device: torch.device) -> Callable[..., Tensor]:
    """(raw logits, targets, lse, gradients of log-probs, T, dtype) to those of raw logits, which may be overwritten."""
    if not _has_kernels(transform, device):
        return partial(_plain_gradients, transform)
    from lockstep.models.kernels.output import log_prob_gradients

    return log_prob_gradients


def _has_kernels(transform: LogitTransform, device: torch.device) -> bool:
    return transform == LogitTransform() and kernels.available(device)


def _plain_log_probs(
    transform: LogitTransform, raw: Tensor, targets: Tensor, T: float
) -> tuple[Tensor, Tensor, Tensor]:
    z = transform(raw).div_(T)
    lse = z.logsumexp(-1)
    logp = z.gather(1, targets[:, None]).squeeze(1) - lse
    z.sub_(lse[:, None])
    return logp, lse, -z.exp().mul_(z).sum(-1)


def _plain_gradients(
    transform: LogitTransform, raw: Tensor, targets: Tensor, lse: Tensor, grad: Tensor, T: float, dtype: torch.dtype
) -> Tensor:
    """d logp / d z = onehot(target) − softmax(z), then through T and the transform."""
    z = transform(raw)
    slope = transform.slope(z) / T
    grad_z = z.div_(T).sub_(lse[:, None]).exp_().mul_(-grad[:, None])
    return grad_z.scatter_add_(1, targets[:, None], grad[:, None]).mul_(slope).to(dtype)


def _add_outer(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += aᵀ·b, in float32."""
    if a.dtype == total.dtype:
        total.addmm_(a.T, b)
    elif a.is_cuda:
        torch.addmm(total, a.T, b, out_dtype=total.dtype, out=total)
    else:  # has no such product
        total += a.T @ b


def chunk_rows(vocab: int, device: torch.device) -> int:
    """How many rows' logits are held at once."""
    return max(MIN_ROWS, CHUNK_ELEMENTS.get(device.type, 2**24) // vocab)


def _chunks(h: Tensor, W: Tensor) -> Iterator[slice]:
    size = chunk_rows(W.shape[0], h.device)
    return (slice(i, i + size) for i in range(0, len(h), size))


def install_head(module: PreTrainedModel, with_value: bool = False) -> LogProbHead:
    """Replaces the output layer in place. Changes `module.config`: give the learner a config of its own."""
    linear = module.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        raise ValueError(f"{type(module).__name__} has no linear output layer but {type(linear).__name__}")
    name = next(name for name, child in module.named_modules() if child is linear)
    head = LogProbHead(linear, take_logit_transform(module), with_value)
    module.set_submodule(name, head)
    return head


def find_head(module: nn.Module) -> LogProbHead:
    return next(child for child in module.modules() if isinstance(child, LogProbHead))


def take_logit_transform(module: PreTrainedModel) -> LogitTransform:
    """Moves the model's own logit transform out of it. One we do not know by name shows in the self-check at load."""
    config = module.config.get_text_config()
    softcap = _take(module, config, "final_logit_softcapping", None)
    scale = cast(float, _take(module, config, "logit_scale", 1.0))  # Cohere
    granite = cast(float, _take(module, config, "logits_scaling", 1.0))
    scale *= granite if config.model_type.startswith("hyperclovax") else 1 / granite
    return LogitTransform(scale, softcap)


def _take(module: PreTrainedModel, config: PreTrainedConfig, name: str, neutral: float | None) -> float | None:
    """The setting's value; what is left behind, in the config and on the modules that copied it, does nothing."""
    found = getattr(config, name, neutral)
    holders = [h for h in (config, module.config, *module.modules()) if isinstance(vars(h).get(name), float | int)]
    for holder in holders:
        setattr(holder, name, neutral)
    return neutral if found is None else float(found)


def _zero_linear(like: nn.Linear) -> nn.Linear:
    value = nn.Linear(like.in_features, 1, device=like.weight.device, dtype=like.weight.dtype)
    nn.init.zeros_(value.weight)
    nn.init.zeros_(value.bias)
    return value
