"""How far the sampler is from the learner and what the objective did about it, as sums that add up over micro-batches.

With d = ℓp − ℓb on sampled tokens; names and meanings are those of `lockstep.metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.algorithms.segments import bounded_exp
from lockstep.types import Batch

TAUS = (1.1, 1.25, 1.5, 2, 3, 5, 10, 100)


@dataclass(slots=True)
class Tally:
    """Named sums and maxima, kept as tensors so that a step on a device never waits for the host."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def add(self, sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor] | None = None) -> None:
        for name, x in sums.items():
            self.sums[name] = self.sums[name] + x.double() if name in self.sums else x.double()
        for name, x in (maxima or {}).items():
            self.maxima[name] = torch.maximum(self.maxima[name], x) if name in self.maxima else x

    def combine(self, sum_all: Callable[[Tensor], Tensor], max_all: Callable[[Tensor], Tensor]) -> None:
        """Over ranks, in two collectives; every rank must have tallied the same names in the same order."""
        self.sums = _together(self.sums, sum_all)
        self.maxima = _together(self.maxima, max_all)

    def read(self) -> tuple[dict[str, float], dict[str, float]]:
        return _to_host(self.sums), _to_host(self.maxima)


def _together(named: dict[str, Tensor], reduce: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    return dict(zip(named, reduce(torch.stack(list(named.values()))), strict=True)) if named else named


def _to_host(named: dict[str, Tensor]) -> dict[str, float]:
    return dict(zip(named, torch.stack(list(named.values())).tolist(), strict=True)) if named else {}


@torch.no_grad()
def tally_mismatch(tally: Tally, batch: Batch, weight: Tensor, cap: float, entropy: Tensor) -> None:
    """Once per token of a step, from the proximal log-probs in `batch` and the correction's `weight` [N]."""
    m = batch.mask
    lp, lb, weight = batch.logp_prox[m], batch.logp_behav[m], weight[m]
    d = lp - lb
    w, dp = bounded_exp(d), (lp.exp() - lb.exp()).abs()
    beyond = d.abs() > torch.tensor(TAUS, device=d.device).log()[:, None]
    lag = batch.lag[m]
    sums = {
        "tokens": m.sum(),
        "k1": -d.sum(),
        "k3": (d.clamp(-20, 20).expm1() - d).sum(),
        "w": w.sum(),
        "w2": (w * w).sum(),
        "dp": dp.sum(),
        "truncated": (weight >= cap).sum(),
        "rejected": (weight == 0).sum(),
        "entropy": entropy[m].sum(),
        "lag": lag.sum(),
    } | dict(zip((f"f{tau}" for tau in TAUS), beyond.sum(1), strict=True))
    tally.add(sums, {"w_max": _max(w), "dp_max": _max(dp), "lag_max": _max(lag)})


@torch.no_grad()
def tally_clipping(tally: Tally, ratio: Tensor, gradient: Tensor, live: Tensor) -> None:
    """Once per token and update. A token is clipped if it has an advantage and a weight (`live`) but no gradient.

    This holds for whatever surrogate: none has to tell where its bounds are.
    """
    clipped = live & (gradient == 0)
    tally.add(
        {
            "clip_tokens": live.sum(),
            "clip_low": (clipped & (ratio < 1)).sum(),
            "clip_high": (clipped & (ratio >= 1)).sum(),
        }
    )


def metrics(tally: Tally) -> dict[str, float]:
    """The tally under the names users see; empty if nothing was tallied."""
    s, m = tally.read()
    n = s.get("tokens", 0.0)
    if not n:
        return {}
    named = {f"mismatch/f{tau}": s[f"f{tau}"] / n for tau in TAUS}
    named |= {f"mismatch/{key}": s[key] / n for key in ("k1", "k3", "truncated", "rejected")}
    named |= {"mismatch/dp_mean": s["dp"] / n, "mismatch/dp_max": m["dp_max"], "mismatch/w_max": m["w_max"]}
    named |= {"mismatch/ess": s["w"] ** 2 / s["w2"] / n, "policy/entropy": s["entropy"] / n}
    named |= {"rollout/lag_mean": s["lag"] / n, "rollout/lag_max": m["lag_max"]}
    live = max(s.get("clip_tokens", 0.0), 1.0)
    return named | {f"policy/{key}": s.get(key, 0.0) / live for key in ("clip_low", "clip_high")}


def explained(returns: Tensor, values: Tensor) -> float:
    """1 − Var(G − V) / Var(G), the share of the returns' variance that the value head predicted; 0 if there is none."""
    spread = returns.var(correction=0)
    return float(1 - (returns - values).var(correction=0) / spread) if spread > 0 else 0.0


def _max(x: Tensor) -> Tensor:
    return x.max().float() if x.numel() else torch.zeros((), device=x.device)
