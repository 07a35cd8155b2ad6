"""docs/algorithms: every method on the page of its family, from the same reading of the code as `lockstep explain`."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from lockstep import algorithms
from lockstep.algorithms.config import ADVANTAGES, CORRECTIONS, REDUCTIONS, SURROGATES
from lockstep.algorithms.reference import ESTIMATORS
from lockstep.algorithms.symbols import SYMBOLS
from lockstep.assembly.recipe import PRESETS
from lockstep.cli.catalog import PAGES, Entry, family, preset_entry
from lockstep.cli.explainable import names
from lockstep.cli.markdown import cited, escape, rows

REPOSITORY = Path(str(algorithms.__file__)).parents[3]
GENERATED = (
    "Generated from the code by `make docs`; do not edit. `lockstep explain NAME` prints the same on a terminal."
)

INDEX = """\
A step of RL turns answers and their rewards into one number to minimise. The pieces it is made of are picked in a
recipe by name:

```text
objective = reduce( correction · (surrogate + coef·KL) )
```

| Piece | What it does | In a recipe |
|---|---|---|
| [advantage](advantages.md) | rewards into a number per token: better or worse than what? | `algorithm.advantage` |
| [surrogate](surrogates.md) | the loss of a token, and how far one batch may move the policy | `algorithm.surrogate` |
| [correction](corrections.md) | a weight, because the sampler was not the learner | `algorithm.correction` |
| [KL](kl.md) | optional: stay near a reference model | `algorithm.kl` |
| [reduction](reductions.md) | how tokens become one number | `algorithm.reduction` |

`surrogate = "dapo"` alone is a complete choice: a surrogate names the companions its paper uses. A
[preset](presets.md) sets all of them, and the number of updates, as a paper states them. Pairs that mean nothing are
refused when the recipe is loaded, with the reason. [Which method when](../which-method.md) helps to choose.

All log-ratios are clamped to ±20 before exp (our choice, in no paper), and everything here is float32. ℓ and ℓp are of
logits divided by the sampling temperature."""

TITLES = {
    SURROGATES: (
        "Surrogates",
        "The loss of one token, minimised; `algorithm.surrogate` in a recipe. A surrogate never masks, averages or "
        "corrects. *Usual* companions are its paper's; a recipe may name others.",
    ),
    CORRECTIONS: (
        "Corrections",
        "What multiplies a token's loss because the sampler was not the learner: other kernels, another precision, "
        "older weights; `algorithm.correction` in a recipe. A weight of 0 rejects. A list multiplies, "
        '`correction = ["tis", "veto"]`: at most one of them weighs, the others only reject.',
    ),
    ADVANTAGES: ("Advantages", "How rewards become a number per token; `algorithm.advantage` in a recipe."),
    REDUCTIONS: (
        "Reductions",
        "How tokens become one number, over all micro-batches and ranks of an optimiser update; "
        "`algorithm.reduction` in a recipe.",
    ),
    ESTIMATORS: (
        "KL to a reference",
        "Estimates of KL(π_θ ‖ π_ref) at sampled tokens; "
        '`algorithm.kl = {estimator = "k3", coef = 1e-3, where = "loss"}` in a recipe. Without `algorithm.kl` there '
        "is no reference model. In the loss the estimate is added to the surrogate; in the reward its sum over an "
        "answer is taken off, before the advantage.",
    ),
}


def index_page() -> str:
    entries = list(family(SURROGATES))
    lines = ["| Surrogate | Loss per token | Advantage | Correction | Reduction |", "|---|---|---|---|---|"]
    lines += [_overview(entry) for entry in entries]
    symbols = ["| Symbol | Meaning |", "|---|---|", *(f"| {name} | {escape(text)} |" for name, text in SYMBOLS.items())]
    parts = ["# Algorithms", GENERATED, INDEX, "## Symbols", "\n".join(symbols), "## At a glance", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _overview(entry: Entry) -> str:
    usual = {label.removeprefix("usual "): text for label, text in entry.facts}
    companions = " | ".join(f"`{usual[kind]}`" for kind in ("advantage", "correction", "reduction"))
    return f"| [`{entry.name}`](surrogates.md#{entry.name}) | {escape(entry.equation[0])} | {companions} |"


def family_page(package: str) -> str:
    title, about = TITLES[package]
    return "\n\n".join([f"# {title}", GENERATED, _filled(about), *map(section, family(package))]) + "\n"


def presets_page() -> str:
    about = (
        'A paper\'s settings, every number with its source or the words *not stated*. `preset = "qurl"` at the top of '
        "a recipe lays them under the recipe's own keys; `lockstep train my.toml preset=qurl` lays them above, in "
        "place of the recipe's whole method. What defines the method is applied; what belongs to the paper's scale, "
        "such as its learning rate, is told under `[paper]` and left to you. `--dry-run` shows the origin of each. "
        "From weak to strong: defaults, the preset of the file, its own keys, a preset on the command line, the other "
        "keys there."
    )
    entries = map(preset_entry, PRESETS.names())
    return "\n\n".join(["# Presets", GENERATED, _filled(about), *map(section, entries)]) + "\n"


def section(entry: Entry) -> str:
    return "\n\n".join(_blocks(entry))


def _blocks(entry: Entry) -> Iterator[str]:
    yield f"## `{entry.name}`"
    yield _linked(entry)
    if entry.equation:
        yield "\n".join(["```text", *entry.equation, "```"])
    if entry.notes:
        yield cited(entry.notes)
    if entry.text:
        yield f"```toml\n{entry.text.strip()}\n```"
    if entry.options:
        yield rows("Option", entry.options).rstrip()
    if entry.facts:
        yield "\n".join(f"- {label}: {_code(text)}" for label, text in entry.facts)
    for refused, reason in entry.refuses:
        yield f"Refuses {_code(refused)}: {reason}."


def _linked(entry: Entry) -> str:
    """Its summary, with where its code is."""
    here = (REPOSITORY / PAGES[PRESETS.package]).parent
    path = os.path.relpath(entry.source, here)
    return f"{cited(entry.summary.rstrip('.'))}. [{entry.source.name}]({path})"


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False)


def _code(text: str) -> str:
    """Names as code, sentences as they are."""
    words = text.split(", ")
    return ", ".join(f"`{word}`" for word in words) if set(words) <= set(names()) else text


METHOD_PAGES: dict[str, Callable[[], str]] = {
    "algorithms/index.md": index_page,
    "algorithms/presets.md": presets_page,
    **{PAGES[package].removeprefix("docs/"): partial(family_page, package) for package in TITLES},
}
