"""From sums to figures by the names of `lockstep.metrics`: `mismatch/k3` of all tokens, `mismatch/lag0/k3` of some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lockstep.algorithms.diagnostics.clipping import CLIPPING
from lockstep.algorithms.diagnostics.mismatch import ACCEPTANCE, MAXIMA, SUMS, TAUS
from lockstep.algorithms.diagnostics.splits import CELLS, LAG, LENGTH
from lockstep.algorithms.diagnostics.tally import Tally

_NO_VARIANCE = 1e-9  # of probabilities: rounding, so there is no correlation to speak of

Rows = Mapping[str, Tensor]  # [1 + cells] each: all tokens, then those of each cell


def metrics(tally: Tally) -> dict[str, float]:
    """The tally under the names users see. A cell without tokens has no names, and neither has an empty tally."""
    tally = tally.on_host()
    if "mismatch" not in tally.sums or not tally.sums["mismatch"][SUMS.index("n")].any():
        return {}
    s, m = _rows(SUMS, tally.sums["mismatch"], _whole), _rows(MAXIMA, tally.maxima["mismatch"], lambda t: t.amax(1))
    found, constant = s["n"] > 0, torch.minimum(_variance(s, "p"), _variance(s, "q")) <= _NO_VARIANCE
    named = _named(_parts("mismatch"), _figures(s, m), found)
    named |= _named(_parts("mismatch"), {"pearson": _correlation(s)}, found & ~constant)
    named |= {"rollout/lag_mean": float(s["lag"][0] / s["n"][0]), "rollout/lag_max": float(m["lag"][0])}
    return (
        named
        | _accepted(tally.sums)
        | _mean(tally.sums, "entropy")
        | _mean(tally.sums, "kl_ref")
        | _clipped(tally.sums)
    )


def _figures(s: Rows, m: Rows) -> dict[str, Tensor]:
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


def _correlation(s: Rows) -> Tensor:
    """Cov(p, q) / √(Var p · Var q)"""
    covariance = s["pq"] / s["n"] - s["p"] * s["q"] / s["n"] ** 2
    return covariance / (_variance(s, "p") * _variance(s, "q")).sqrt()


def _variance(s: Rows, x: str) -> Tensor:
    return s[f"{x}²"] / s["n"] - (s[x] / s["n"]) ** 2


def _accepted(sums: Rows) -> dict[str, float]:
    """By the length of answers. These are cells of answers, not of tokens, and have figures of their own."""
    s = dict(zip(ACCEPTANCE, sums["acceptance"], strict=True))
    shares = {
        "answers": s["answers"],
        "accepted_answers": s["accepted answers"] / s["answers"],
        "accepted_tokens": s["accepted tokens"] / s["tokens"],
    }
    return _named([f"mismatch/{cell}" for cell in LENGTH.cells], shares, s["answers"] > 0)


def _mean(sums: Rows, name: str) -> dict[str, float]:
    if name not in sums:
        return {}
    count, total = sums[name].tolist()
    return {f"policy/{name}": total / count}


def _clipped(sums: Rows) -> dict[str, float]:
    """As shares of the tokens that could have been clipped; nothing before the first update of a step."""
    if "clipping" not in sums:
        return {}
    s = _rows(CLIPPING, sums["clipping"], _whole)
    known = s["live"] > 0
    known[0] = True  # no token could be clipped, so none was
    return _named(_parts("policy"), {side: s[side] / s["live"].clamp(min=1) for side in CLIPPING[1:]}, known)


def _rows(names: Sequence[str], table: Tensor, whole: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """A table's rows by name, with the figure of all tokens before those of the cells."""
    return dict(zip(names, torch.cat([whole(table)[:, None], table], 1), strict=True))


def _whole(table: Tensor) -> Tensor:
    """Each split has every token once; by lag is as good as any."""
    return table[:, : len(LAG.cells)].sum(1)


def _parts(group: str) -> list[str]:
    return [group, *(f"{group}/{cell}" for cell in CELLS)]


def _named(parts: Sequence[str], figures: Rows, known: Tensor) -> dict[str, float]:
    """Column i of a figure under the name of part i, where it is known."""
    there = known.nonzero().flatten().tolist()
    columns = {figure: values.tolist() for figure, values in figures.items()}
    return {f"{parts[i]}/{figure}": values[i] for i in there for figure, values in columns.items()}
