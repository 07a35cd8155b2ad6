"""From sums to figures by the names of `lockstep.metrics`: `mismatch/k3` of all tokens, `mismatch/lag0/k3` of some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lockstep.algorithms.diagnostics.clipping import CLIPPING
from lockstep.algorithms.diagnostics.mismatch import ACCEPTANCE, MAXIMA, SUMS, TAUS
from lockstep.algorithms.diagnostics.routing import routing_metrics
from lockstep.algorithms.diagnostics.splits import CELLS, LAG, LENGTH
from lockstep.algorithms.diagnostics.tally import Tally

_NO_VARIANCE = 1e-9  # of probabilities: rounding, so there is no correlation to speak of

Array = NDArray[np.float64]
Rows = Mapping[str, Array]  # an entry per part that has tokens


def metrics(tally: Tally) -> dict[str, float]:
    """The tally under the names users see. A part without tokens has no names, and neither has an empty tally."""
    tally = tally.on_host()
    if "mismatch" not in tally.sums or not tally.sums["mismatch"][SUMS.index("n")].any():
        return {}
    sums, maxima = _with_whole(tally.sums["mismatch"]), _with_whole(tally.maxima["mismatch"], np.max)
    there = sums[SUMS.index("n")] > 0
    parts, s = _parts("mismatch", there), dict(zip(SUMS, sums[:, there], strict=True))
    m = dict(zip(MAXIMA, maxima[:, there], strict=True))
    named = _named(parts, _figures(s, m)) | _correlations(parts, s)
    named |= {"rollout/lag_mean": float(s["lag"][0] / s["n"][0]), "rollout/lag_max": float(m["lag"][0])}
    means = _mean(tally.sums, "entropy") | _mean(tally.sums, "kl_ref")
    return named | _accepted(tally.sums) | means | _clipped(tally.sums) | routing_metrics(tally.sums)


def _figures(s: Rows, m: Rows) -> dict[str, Array]:
    n = s["n"]
    return {
        "tokens": n,
        "k1": -s["d"] / n,
        "k3": s["k3"] / n,
        "chi2": s["(w-1)²"] / n,
        "ess": s["w"] ** 2 / s["w²"] / n,
        "w_max": m["w"],
        "dp_mean": s["|p-q|"] / n,
        "dp_max": m["|p-q|"],
        "truncated": s["truncated"] / n,
        "rejected": s["rejected"] / n,
    } | {f"f{tau}": s[f"f{tau}"] / n for tau in TAUS}


def _correlations(parts: Sequence[str], s: Rows) -> dict[str, float]:
    """Cov(p, q) / √(Var p · Var q), where both vary."""
    n = s["n"]
    var_p, var_q = (s[f"{x}²"] / n - (s[x] / n) ** 2 for x in "pq")
    covariance = s["pq"] / n - s["p"] * s["q"] / n**2
    vary = ~(np.minimum(var_p, var_q) <= _NO_VARIANCE)
    pearson = covariance[vary] / np.sqrt(var_p[vary] * var_q[vary])
    return _named(list(compress(parts, vary)), {"pearson": pearson})


def _accepted(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """By the length of answers. These are parts of the answers, not of the tokens, and have figures of their own."""
    table = sums["acceptance"].numpy()
    there = table[0] > 0
    s = dict(zip(ACCEPTANCE, table[:, there], strict=True))
    shares = {
        "answers": s["answers"],
        "accepted_answers": s["accepted answers"] / s["answers"],
        "accepted_tokens": s["accepted tokens"] / s["tokens"],
    }
    return _named([f"mismatch/{cell}" for cell in compress(LENGTH.cells, there)], shares)


def _mean(sums: Mapping[str, Tensor], name: str) -> dict[str, float]:
    if name not in sums:
        return {}
    count, total = sums[name].tolist()
    return {f"policy/{name}": total / count}


def _clipped(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """As shares of the tokens that could have been clipped; nothing before the first update of a step."""
    if "clipping" not in sums:
        return {}
    table = _with_whole(sums["clipping"])
    there = table[0] > 0
    there[0] = True  # no token could be clipped, so none was
    live, *sides = table[:, there]
    shares = {side: clipped / np.maximum(live, 1) for side, clipped in zip(CLIPPING[1:], sides, strict=True)}
    return _named(_parts("policy", there), shares)


def _with_whole(table: Tensor, over: Callable[..., Array] = np.sum) -> Array:
    """A column for all tokens before those of the cells. Each split has every token once; by lag is as good as any."""
    cells = table.numpy()
    return np.concatenate([over(cells[:, : len(LAG.cells)], axis=1, keepdims=True), cells], axis=1)


def _parts(group: str, there: NDArray[np.bool_]) -> list[str]:
    return list(compress([group, *(f"{group}/{cell}" for cell in CELLS)], there))


def _named(parts: Sequence[str], figures: Rows) -> dict[str, float]:
    """Entry i of a figure under the name of part i."""
    return {
        f"{part}/{figure}": value
        for figure, values in figures.items()
        for part, value in zip(parts, values.tolist(), strict=True)
    }
