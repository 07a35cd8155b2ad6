"""float32 master weights under a module that computes in a lower precision.

The module really holds bfloat16 or float16 parameters, so that it does the engine's arithmetic (autocast would not).
A learning rate of 1e-6 changes no bit of a bfloat16 weight, so the optimiser updates float32 masters instead.
Parameters that are float32 already (FSDP2's shards under a mixed-precision policy are) are their own masters: no copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

MAX_NONFINITE = 10  # updates in a row; a single one may be an outlier, these are not


class Skip(StrEnum):
    """Why an update left weights and optimiser as they were."""

    EMPTY = "nothing to learn from"  # the gradient is zero
    NONFINITE = "the gradient is not finite"
    REFUSED = "the step was not approved"


@dataclass(frozen=True, slots=True)
class StepOutcome:
    grad_norm: float  # of the divided gradient, before clipping; inf or NaN when it is not finite
    skipped: Skip | None


class MasterWeights:
    """What the optimiser owns of a module: scale each loss, call backward, and `step` once per update.

        masters = MasterWeights(module, dtype)
        optimiser = build_optimiser(plugin, masters.named_parameters(), learning_rate, weight_decay)
        for micro_batch in update:
            masters.scale(loss_sum(micro_batch)).backward()
        outcome = masters.step(optimiser, max_norm=1.0, denominator=num_tokens)

    Build it after sharding the module, and keep the module's parameters in place: it is tied to their storage.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        """`dtype` is what the module computes in: float16 gets loss scaling, wherever its masters are."""
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}  # tied weights appear once
        self._masters: dict[str, Tensor] = {name: _master_of(p) for name, p in trained.items()}
        self._copies = [(p, self._masters[name]) for name, p in trained.items() if self._masters[name] is not p]
        for parameter, master in self._copies:
            parameter.register_post_accumulate_grad_hook(_accumulate_into(master))
        self._loss_scale = LossScale() if dtype == torch.float16 else None
        self._num_nonfinite = 0  # since the last update that was made

    @property
    def loss_scale(self) -> float:
        return self._loss_scale.value if self._loss_scale else 1.0

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The float32 masters under their parameters' names."""
        yield from self._masters.items()

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call `backward` on: float16 gradients would underflow without the factor."""
        return loss * self._loss_scale.value if self._loss_scale else loss

    def step(self, optimiser: Optimizer, *, max_norm: float | None = None, denominator: float = 1.0) -> StepOutcome:
        """One update from the gradients accumulated since the last; they are cleared, and the module has the result.

        The accumulated sum is divided by `denominator` once, then clipped to the global norm `max_norm`. Under FSDP2,
        which averages over ranks, a global denominator is to be divided by the number of ranks.

        Raises FloatingPointError when gradients stay inf or NaN: the weights may be, and no later batch heals them.
        """
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        divisor = denominator * self.loss_scale
        raw_norm = _global_norm(gradients)
        skipped = _why_skip(raw_norm)
        self._react(skipped)
        if skipped is None:
            _divide_and_clip(gradients, raw_norm, divisor, max_norm)
            optimiser.step()
            self.publish()
        self.zero_grad()
        return StepOutcome(raw_norm if skipped else raw_norm / divisor, skipped)

    def _react(self, skipped: Skip | None) -> None:
        """A loss scale goes down until it cannot; without one, gradients get a few updates to become finite again."""
        if self._loss_scale:
            self._loss_scale.update(overflowed=skipped is Skip.NONFINITE)
        elif skipped is None:
            self._num_nonfinite = 0
        elif skipped is Skip.NONFINITE:
            self._num_nonfinite += 1
            if self._num_nonfinite == MAX_NONFINITE:
                raise FloatingPointError(
                    f"gradients were inf or NaN in {MAX_NONFINITE} updates in a row, so nothing is learned any more: "
                    "go on from an earlier checkpoint with a lower learner.learning_rate, or look for inf and NaN in "
                    "the model's weights"
                )

    @torch.no_grad()
    def publish(self) -> None:
        """Rounds the masters into the module's own parameters, in place; `step` and `load_state_dict` do it."""
        if self._copies:
            parameters, masters = zip(*self._copies, strict=True)
            torch._foreach_copy_(parameters, masters)

    def zero_grad(self) -> None:
        for master in self._masters.values():
            master.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Every trained weight in float32 and the loss scale: live tensors, to be saved before the next update."""
        weights = {name: master.detach() for name, master in self._masters.items()}
        return {"weights": weights, "loss_scale": asdict(self._loss_scale) if self._loss_scale else None}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of a state without `misfits`."""
        for name, master in self._masters.items():
            master.copy_(state["weights"][name])
        if self._loss_scale and state["loss_scale"]:
            self._loss_scale = LossScale(**state["loss_scale"])
        self.publish()

    def misfits(self, weights: Mapping[str, Tensor]) -> list[str]:
        """What keeps saved weights from being loaded, in words: names on one side only, and other shapes."""
        ours = self._masters
        reshaped = [name for name in ours if name in weights and weights[name].shape != ours[name].shape]
        return [
            *(f"it lacks {name}" for name in ours if name not in weights),
            *(f"its {name} has no place in the model" for name in weights if name not in ours),
            *(f"its {name} is {[*weights[name].shape]}, the model's is {[*ours[name].shape]}" for name in reshaped),
        ]


@dataclass(slots=True)
class LossScale:
    """Keeps float16 gradients in range: halved by every overflow, doubled after `patience` updates without one.

    It starts lower than is usual because our losses are sums over tokens, not means, and because an update skipped
    for an overflow wastes a sampled batch; it grows sooner because a run has hundreds of updates, not millions.
    The global gradient norm, needed for clipping anyway and equal on all ranks, is finite unless something overflowed,
    so no second pass looks for infinities.
    """

    value: float = 2.0**8
    clean_updates: int = 0
    patience: int = 200
    smallest: float = 2.0**-24

    def update(self, *, overflowed: bool) -> None:
        self.clean_updates = 0 if overflowed else self.clean_updates + 1
        if overflowed:
            self.value /= 2
        elif self.clean_updates % self.patience == 0:
            self.value *= 2
        if self.value < self.smallest:
            raise FloatingPointError(f"gradients are inf or NaN even at a loss scale of {self.value}")


def _why_skip(norm: float) -> Skip | None:
    if not math.isfinite(norm):
        return Skip.NONFINITE
    return Skip.EMPTY if norm == 0 else None


def _master_of(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype not in (torch.bfloat16, torch.float16):
        return parameter
    return parameter.detach().to(torch.float32).requires_grad_()


def _accumulate_into(master: Tensor) -> Callable[[Tensor], None]:
    """A hook that moves a micro-batch's gradient to the master: low-precision sums would lose small summands."""

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad, None
        master.grad = gradient.to(torch.float32) if master.grad is None else master.grad.add_(gradient)

    return hook


def _global_norm(gradients: list[Tensor]) -> float:
    """2-norm over all gradients and, where they are sharded, all ranks; 0 if there are none."""
    norm = nn.utils.get_total_norm(gradients)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def _divide_and_clip(gradients: list[Tensor], raw_norm: float, divisor: float, max_norm: float | None) -> None:
    if divisor <= 0:
        raise ValueError(f"gradients of norm {raw_norm} cannot be divided by {divisor}")
    clipped = math.inf if max_norm is None else max_norm / raw_norm
    factor = min(1 / divisor, clipped)
    if factor != 1:
        torch._foreach_mul_(gradients, factor)
