"""How good the value head is."""

from __future__ import annotations

from torch import Tensor


def explained(returns: Tensor, values: Tensor) -> float:
    """1 − Var(G − V) / Var(G), the share of the returns' variance that the value head predicted; 0 if there is none."""
    spread = returns.var(correction=0)
    return float(1 - (returns - values).var(correction=0) / spread) if spread > 0 else 0.0
