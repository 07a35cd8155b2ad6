"""The objectives again, in float64 and plain loops over sequences: equations and slopes worked out by hand.

Nothing of the package is imported, and nothing is differentiated: for every token there is the loss and dloss/dℓ.
`E` is exp with its argument clamped to ±20, beyond which its slope is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

Token = tuple[float, float]  # loss, slope in the token's own ℓ


@dataclass(frozen=True)
class Answer:
    m: list[bool]
    now: list[float]  # ℓ
    lp: list[float]
    lb: list[float]
    A: list[float]

    def mean(self, x: Sequence[float]) -> float:
        sampled = [value for value, m in zip(x, self.m, strict=True) if m]
        return sum(sampled) / len(sampled) if sampled else 0.0

    def total(self, x: Sequence[float]) -> float:
        return sum(value for value, m in zip(x, self.m, strict=True) if m)

    @property
    def d(self) -> list[float]:
        return [p - b for p, b in zip(self.lp, self.lb, strict=True)]


def E(x: float) -> float:  # noqa: N802
    return math.exp(min(max(x, -20.0), 20.0))


def slope(x: float) -> float:
    """dE/dx."""
    return math.exp(x) if abs(x) <= 20 else 0.0


def token_by_token(loss: Callable[[float, float, float], Token]) -> Callable[[Answer], list[Token]]:
    """From loss(x, A, w) of x = ℓ − ℓp."""

    def of(seq: Answer) -> list[Token]:
        xs = (new - old for new, old in zip(seq.now, seq.lp, strict=True))
        return [loss(x, A, E(d)) for x, A, d in zip(xs, seq.A, seq.d, strict=True)]

    return of


def ppo(low: float, high: float) -> Callable[[float, float, float], Token]:
    """As the figure in the PPO paper draws it: flat where A pushes beyond the bound."""

    def loss(x: float, A: float, _: float) -> Token:
        r = E(x)
        if A > 0 and r > 1 + high:
            return -(1 + high) * A, 0.0
        if A < 0 and r < 1 - low:
            return -(1 - low) * A, 0.0
        return -r * A, -slope(x) * A

    return loss


def acr(eps: float, cap: float) -> Callable[[float, float, float], Token]:
    return lambda x, A, w: ppo(eps, (1 + eps) / min(1.0, cap / w) - 1)(x, A, w)


def dual_clip(eps: float, c: float) -> Callable[[float, float, float], Token]:
    def loss(x: float, A: float, w: float) -> Token:
        return (-c * A, 0.0) if A < 0 and E(x) > c else ppo(eps, eps)(x, A, w)

    return loss


def sapo(tau_pos: float, tau_neg: float) -> Callable[[float, float, float], Token]:
    def loss(x: float, A: float, _: float) -> Token:
        tau, r = (tau_neg if A < 0 else tau_pos), E(x)
        z = tau * (r - 1)
        gate = 1 / (1 + math.exp(-z)) if z < 500 else 1.0
        return -A * 4 / tau * gate, -A * 4 * gate * (1 - gate) * slope(x)

    return loss


def weighted(loss: Callable[[float, float, float], Token]) -> Callable[[float, float, float], Token]:
    """w times it."""

    def both(x: float, A: float, w: float) -> Token:
        value, gradient = loss(x, A, w)
        return w * value, w * gradient

    return both


def reinforce(seq: Answer) -> list[Token]:
    return [(-A, -A) for A in seq.A]


def on_policy(seq: Answer) -> list[Token]:
    return token_by_token(lambda x, A, _: (-E(x) * A, -slope(x) * A))(seq)


def ppo_is(seq: Answer) -> list[Token]:
    return token_by_token(ppo(0.2, 0.2))(replace(seq, lp=seq.lb))


def cispo(high: float) -> Callable[[Answer], list[Token]]:
    def of(seq: Answer) -> list[Token]:
        tokens = zip(seq.now, seq.lp, seq.A, strict=True)
        return [(-min(E(new - old), 1 + high) * A * new, -min(E(new - old), 1 + high) * A) for new, old, A in tokens]

    return of


def gspo(low: float, high: float) -> Callable[[Answer], list[Token]]:
    """The token form: s in the place of r, its slope on every token."""

    def of(seq: Answer) -> list[Token]:
        x = seq.mean([new - old for new, old in zip(seq.now, seq.lp, strict=True)])
        return [ppo(low, high)(x, A, 1.0) for A in seq.A]

    return of


def tbpo(high: float, neg_low: float, neg_high: float) -> Callable[[Answer], list[Token]]:
    def of(seq: Answer) -> list[Token]:
        x = seq.mean([new - old for new, old in zip(seq.now, seq.lp, strict=True)])
        return [band(x, A) for A in seq.A]

    def band(x: float, A: float) -> Token:
        bottom, top = (1 - neg_low, 1 + neg_high) if A < 0 else (0.0, 1 + high)
        s = E(x)
        return (-s * A, -slope(x) * A) if bottom <= s <= top else (-(bottom if s < bottom else top) * A, 0.0)

    return of


CLIPPED = token_by_token(ppo(0.2, 0.2))
WEIGHTED = token_by_token(weighted(ppo(0.2, 0.2)))
SURROGATES: dict[str, Callable[[Answer], list[Token]]] = {
    "reinforce": reinforce,
    "rloo": reinforce,
    "reinforce_pp": CLIPPED,
    "ppo": CLIPPED,
    "grpo": CLIPPED,
    "dr_grpo": CLIPPED,
    "positive_grpo": CLIPPED,
    "on_policy_grpo": on_policy,
    "dapo": token_by_token(ppo(0.2, 0.28)),
    "dual_clip": token_by_token(dual_clip(0.2, 3.0)),
    "gspo": gspo(3e-4, 4e-4),
    "cispo": cispo(0.28),
    "sapo": token_by_token(sapo(1.0, 1.05)),
    "tbpo": tbpo(4e-4, 3e-4, 7e-4),
    "acr": token_by_token(acr(0.2, 2.0)),
    "ppo_is": ppo_is,
    "vanilla_is": WEIGHTED,
    "decoupled_ppo": WEIGHTED,
}
PROX_NOW = {"reinforce", "rloo"}  # ℓp := sg(ℓ), for the correction too


def everywhere(weight: Callable[[Answer], float]) -> Callable[[Answer], list[float]]:
    """One weight on all tokens of a sequence."""
    return lambda seq: [weight(seq)] * len(seq.m)


def mis(seq: Answer) -> float:
    w = E(seq.total(seq.d))
    return 0.0 if w > 2 else w


def icepop(seq: Answer) -> list[float]:
    return [E(d) if 0.5 <= E(d) <= 5 else 0.0 for d in seq.d]


def veto(seq: Answer) -> float:
    return 0.0 if any(m and E(d) < 1e-4 for m, d in zip(seq.m, seq.d, strict=True)) else 1.0


CORRECTIONS: dict[str, Callable[[Answer], list[float]]] = {
    "none": everywhere(lambda seq: 1.0),
    "is": lambda seq: [E(d) for d in seq.d],
    "tis": lambda seq: [min(E(d), 2.0) for d in seq.d],
    "seq_tis": everywhere(lambda seq: min(E(seq.total(seq.d)), 2.0)),
    "geo_tis_band": everywhere(lambda seq: min(max(E(seq.mean(seq.d)), 0.5), 2.0)),
    "mis": everywhere(mis),
    "geo_rs": everywhere(lambda seq: float(abs(E(seq.mean(seq.d)) - 1) <= 1e-3)),
    "icepop": icepop,
    "veto": everywhere(veto),
}


def token_mean(counted: list[list[bool]]) -> list[float]:
    return [1 / sum(map(sum, counted))] * len(counted)


def seq_mean(counted: list[list[bool]]) -> list[float]:
    present = sum(map(any, counted))
    return [1 / sum(row) / present if any(row) else 0.0 for row in counted]


def seq_mean_token_sum(counted: list[list[bool]]) -> list[float]:
    return [1 / sum(map(any, counted))] * len(counted)


def token_sum_norm(counted: list[list[bool]]) -> list[float]:
    return [1 / (sum(map(any, counted)) * 1024)] * len(counted)


REDUCTIONS: dict[str, Callable[[list[list[bool]]], list[float]]] = {
    "token_mean": token_mean,
    "seq_mean": seq_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "token_sum_norm": token_sum_norm,
}
"""What a token of each sequence weighs, from which tokens count; at least one does."""


def objective(
    seqs: Sequence[Answer], surrogate: str, corrections: Sequence[str], reduction: str, count_rejected: bool
) -> tuple[float, list[float]]:
    """Loss and gradient in ℓ, token by token; both 0 if nothing counts."""
    seqs = [replace(seq, lp=seq.now) for seq in seqs] if surrogate in PROX_NOW else list(seqs)
    weights = [[math.prod(ws) for ws in zip(*(CORRECTIONS[c](seq) for c in corrections), strict=True)] for seq in seqs]
    learns = [[m and w != 0 for m, w in zip(seq.m, row, strict=True)] for seq, row in zip(seqs, weights, strict=True)]
    counted = [list(seq.m) for seq in seqs] if count_rejected else learns
    if not any(map(any, counted)):
        return 0.0, [0.0 for seq in seqs for _ in seq.m]
    value, gradient = 0.0, []
    for seq, row, learn, share in zip(seqs, weights, learns, REDUCTIONS[reduction](counted), strict=True):
        for (loss, dloss), w, yes in zip(SURROGATES[surrogate](seq), row, learn, strict=True):
            value += share * w * loss if yes else 0.0
            gradient.append(share * w * dloss if yes else 0.0)
    return value, gradient
