"""What `lockstep analyze routing` found: where sampler and learner choose other experts, and what replay changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.metrics import TAUS
from lockstep.report.charts import Chart, Format, Line, Panel

MAX_POINTS = 4000  # of a scatter plot
_BINS = 24

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two probabilities of every sampled token."""

    key: str  # "live"
    label: str  # "sampler and learner"
    x_label: str  # whose probabilities `x` are
    y_label: str
    x: Floats  # [sampled tokens]
    y: Floats
    metrics: Mapping[str, float]  # of the two, by the names of `lockstep.metrics`

    @property
    def f_curve(self) -> Floats:
        return np.array([self.metrics[f"mismatch/f{tau:g}"] for tau in TAUS])


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteStudy:
    """Of one model, on the answers that its sampler gave."""

    model: str
    facts: Mapping[str, str]  # {"sampler": "fp8_w8a8", "answers": "64"}
    num_experts: int
    top_k: int
    live: Comparison  # sampler and learner, each with experts of its own choice
    replayed: Comparison  # the learner with the sampler's experts
    repeated: Comparison  # the learner twice, packed differently: what no replay can remove
    differing: Sequence[NDArray[np.int64]]  # of every answer [tokens, layers]: the sampler's experts not chosen live

    @property
    def comparisons(self) -> tuple[Comparison, Comparison, Comparison]:
        return self.live, self.replayed, self.repeated

    @property
    def num_layers(self) -> int:
        return self.differing[0].shape[1]

    def by_router(self) -> Floats:
        """Share of routers (token and layer) that differ in 0, 1, … top-k experts."""
        counts = np.bincount(np.concatenate([x.ravel() for x in self.differing]), minlength=self.top_k + 1)
        return counts / counts.sum()

    def by_token(self) -> Floats:
        """Share of tokens with 0, 1, … differing layers."""
        counts = np.bincount(np.concatenate([(x > 0).sum(1) for x in self.differing]), minlength=self.num_layers + 1)
        return counts / counts.sum()

    def by_sequence(self) -> Floats:
        """Of every answer, the mean number of differing layers per token."""
        return np.array([(x > 0).sum(1).mean() for x in self.differing])

    def by_layer(self) -> Floats:
        """Share of tokens that differ in each layer."""
        return (np.concatenate(list(self.differing)) > 0).mean(0)

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "facts": dict(self.facts),
            "experts": self.num_experts,
            "top_k": self.top_k,
            "metrics": {c.key: dict(c.metrics) for c in self.comparisons},
            "routers_by_differing_experts": self.by_router().tolist(),
            "tokens_by_differing_layers": self.by_token().tolist(),
            "differing_layers_per_token_of_sequences": self.by_sequence().tolist(),
            "differing_tokens_of_layers": self.by_layer().tolist(),
            "probabilities": {
                c.key: {"x": x.tolist(), "y": y.tolist()} for c in self.comparisons for x, y in [_thin(c)]
            },
        }

    def panels(self) -> list[Panel]:
        return [self._f_panel(), *map(_scatter, self.comparisons), *self._histograms()]

    def _f_panel(self) -> Panel:
        lines = [Line(c.label, np.array(TAUS), c.f_curve, i) for i, c in enumerate(self.comparisons)]
        help_ = "F(τ) is the share of sampled tokens whose two probabilities are more than a factor τ apart"
        some = any((line.y > 0).any() for line in lines)
        chart = _chart("f_curve", "F(τ)", f"{help_} (the paper's Fig. 2d).")
        return Panel(chart=chart, lines=lines, x_label="τ", x_log=True, y_log=some, tall=True)

    def _histograms(self) -> list[Panel]:
        means = self.by_sequence()
        shares, edges = np.histogram(means, bins=min(_BINS, len(means)))
        return [
            _bars(
                "by_router",
                "Routers",
                f"By how many of the sampler's {self.top_k} experts the learner did not choose (Fig. 3a).",
                self.by_router(),
                "experts",
            ),
            _bars(
                "by_token",
                "Tokens",
                f"By the number of their {self.num_layers} routers that differ, prompts included (Fig. 3b).",
                self.by_token(),
                "routers",
            ),
            _bars(
                "by_sequence",
                "Sequences",
                "By the mean number of differing routers per token (Fig. 3c).",
                shares / shares.sum(),
                "routers",
                (edges[1:] + edges[:-1]) / 2,
            ),
            _bars(
                "by_layer",
                "Layers",
                "Share of tokens whose experts differ, layer by layer; the first layer with experts is 0.",
                self.by_layer(),
                "layer",
            ),
        ]


def _chart(key: str, title: str, help_: str, format: Format = "percent", stacked: bool = False) -> Chart:
    return Chart(key=key, title=title, help=help_, metrics={}, format=format, stacked=stacked)


def _bars(key: str, title: str, help_: str, y: Floats, x_label: str, x: Floats | None = None) -> Panel:
    places = np.arange(len(y), dtype=np.float64) if x is None else x
    return Panel(chart=_chart(key, title, help_, stacked=True), lines=[Line(title, places, y, 0)], x_label=x_label)


def _scatter(c: Comparison) -> Panel:
    x, y = _thin(c)
    help_ = f"{c.y_label} over {c.x_label}, a dot per sampled token; on the diagonal they agree (Fig. 2a, 2b, 4)."
    chart = _chart(f"scatter_{c.key}", f"Probabilities: {c.label}", help_, "number")
    return Panel(chart=chart, lines=[Line(c.label, x, y, 0)], x_label=c.x_label, scatter=True, tall=True)


def _thin(c: Comparison) -> tuple[Floats, Floats]:
    """The same tokens in every plot."""
    if len(c.x) <= MAX_POINTS:
        return c.x, c.y
    chosen = np.sort(np.random.default_rng(0).choice(len(c.x), MAX_POINTS, replace=False))
    return c.x[chosen], c.y[chosen]
