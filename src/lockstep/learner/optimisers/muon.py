"""Muon: momentum whose matrices are orthogonalised before they are applied (K. Jordan et al., 2024).

Scaled as in Moonlight (Liu et al., arXiv:2502.16982) by 0.2·sqrt(max(rows, cols)), an update has the RMS of a typical
AdamW update, so learning rates and weight decay tuned for AdamW carry over. Hidden matrices, fused expert weights
included, take this path; embeddings, output heads, routers, norms and biases take AdamW inside the same optimiser.
A weight that stores several projections in one matrix (a fused gate_up) is orthogonalised as it is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim.adamw import adamw

from lockstep.learner.optimisers._grouping import Decay, Named, decay_groups, is_hidden_matrix, partition

# The odd polynomial a·x + b·x³ + c·x⁵ with the steepest slope at 0 that keeps singular values near 1 (Jordan, 2024).
QUINTIC = (3.4445, -4.7750, 2.0315)
MATCH_ADAMW_RMS = 0.2
BATCH_ELEMENTS = 2**24  # orthogonalised at once; an H200 steps a 0.6B model in 52 ms, one by one in 140


@dataclass(frozen=True, slots=True, kw_only=True)
class Muon:
    """Nesterov momentum, orthogonalised; `betas` and `eps` are AdamW's, for all that is no hidden matrix."""

    momentum: Decay = 0.95
    iterations: Annotated[int, Field(ge=1, le=100)] = 5
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-8

    def __call__(self, named: Named, learning_rate: float, weight_decay: float) -> MuonAdamW:
        hidden, others = partition(named, is_hidden_matrix)
        muon = {"muon": True, "momentum": self.momentum, "iterations": self.iterations}
        adam = {"muon": False, "betas": self.betas, "eps": self.eps}
        groups = decay_groups(hidden, weight_decay, **muon) + decay_groups(others, weight_decay, **adam)
        return MuonAdamW(groups, learning_rate)


class MuonAdamW(torch.optim.Optimizer):
    """One optimiser, one state, two rules: a group's `muon` flag says which."""

    def __init__(self, groups: list[dict[str, Any]], learning_rate: float) -> None:
        super().__init__(groups, {"lr": learning_rate})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None, "losses are accumulated over micro-batches, not re-evaluated"
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            rule = self._step_muon if group["muon"] else self._step_adamw
            rule(parameters, group)

    def _step_muon(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for batch in _same_shape_batches(parameters):
            used = [_is_used(_gradient(p)) for p in batch]
            momenta = [self._nesterov(p, u, group["momentum"]) for p, u in zip(batch, used, strict=True)]
            directions = muon_directions(momenta, group["iterations"])
            for parameter, u, direction in zip(batch, used, directions, strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"] * u)
                parameter.sub_(group["lr"] * u * direction)

    def _nesterov(self, parameter: Tensor, used: Tensor, beta: float) -> Tensor:
        """Moves the momentum, where used, and returns it as it would be after the same gradient once more."""
        state, grad = self.state[parameter], _gradient(parameter)
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(grad, (1 - beta) * used)
        return grad.lerp(state["momentum"], beta)

    def _step_adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [_gradient(parameter) for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            max_exp_avg_sqs=[],
            state_steps=[state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _is_used(grad: Tensor) -> Tensor:
    """[..., 1, 1]: False for a matrix without any gradient, such as an expert that saw no token.

    It must stay where it is: orthogonalised momentum does not shrink as it fades, so it would drift on for ever.
    """
    return torch.linalg.vector_norm(grad, ord=math.inf, dim=(-2, -1), keepdim=True) > 0


def _same_shape_batches(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Matrices to iterate on together: a kernel per matrix would leave an accelerator idle between launches."""
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for parameter in parameters:
        by_shape.setdefault(parameter.shape, []).append(parameter)
    for same in by_shape.values():
        size = max(1, BATCH_ELEMENTS // same[0].numel())
        yield from (same[i : i + size] for i in range(0, len(same), size))


def muon_directions(momenta: Sequence[Tensor], iterations: int) -> list[Tensor]:
    """The orthogonalised, scaled directions of equally shaped momenta [..., rows, cols], sharded as they were."""
    rows, cols = momenta[0].shape[-2:]
    whole = [_gather(momentum) for momentum in momenta]
    flat = [matrix.reshape(-1, rows, cols) for matrix in whole]
    stacked = orthogonalise(torch.cat(flat) if len(flat) > 1 else flat[0], iterations)
    scaled = (stacked * (MATCH_ADAMW_RMS * math.sqrt(max(rows, cols)))).split([len(part) for part in flat])
    return [_scatter(part.reshape(w.shape), m) for part, w, m in zip(scaled, whole, momenta, strict=True)]


def _holds_whole_matrices(momentum: DTensor) -> bool:
    return momentum.ndim == 3 and all(p == Shard(0) or p.is_replicate() for p in momentum.placements)


def _gather(momentum: Tensor) -> Tensor:
    """All of a sharded matrix, for a shard has other singular vectors; of experts sharded as wholes only our own."""
    if not isinstance(momentum, DTensor):
        return momentum
    return momentum.to_local() if _holds_whole_matrices(momentum) else momentum.full_tensor()


def _scatter(direction: Tensor, momentum: Tensor) -> Tensor:
    """Undoes `_gather`: every rank has computed the same matrix and keeps its own part, without communication."""
    if not isinstance(momentum, DTensor):
        return direction
    mesh, placements = momentum.device_mesh, momentum.placements
    if _holds_whole_matrices(momentum):
        return DTensor.from_local(direction, mesh, placements, shape=momentum.shape, stride=momentum.stride())
    return distribute_tensor(direction, mesh, placements, src_data_rank=None)


def orthogonalise(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Approximately U·Vᵀ of each matrix U·S·Vᵀ in [n, rows, cols], by Newton–Schulz iteration.

    Five iterations take singular values above 0.2% of the Frobenius norm to between 0.68 and 1.21; zero stays zero.
    bfloat16 on an accelerator, where it is accurate enough; float32 on a CPU, where it is faster.
    """
    a, b, c = QUINTIC
    x = matrices if matrices.device.type == "cpu" else matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # the Gram matrix is then the smaller of the two
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-30)
    for _ in range(iterations):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)
