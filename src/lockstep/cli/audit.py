"""`lockstep audit`: what sampler and learner run, layer by layer."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from lockstep.assembly.roles import Training, load_model
from lockstep.cli.inference import checkpoint_and_recipe
from lockstep.config import ConfigError
from lockstep.controller.audit import AuditFailed, differences
from lockstep.learner.checkpoint import FILE
from lockstep.report.recorder import Recorders
from lockstep.types import Operator


def audit(checkpoint: str, overrides: Sequence[str], *, recipe: str | None, console: Console) -> None:
    """Builds both sides as training would, publishes once, and compares. Raises AuditFailed on any difference.

    A run's as it would go on, from its master weights; with a `recipe`, as a new run would begin with the checkpoint.
    """
    path, chosen = checkpoint_and_recipe(checkpoint, overrides, recipe, console)
    if recipe is None and not (Path(path) / FILE).is_file():
        raise ConfigError(f"{Path(path) / FILE} is missing, with which the run would go on: name a --recipe instead")

    async def run() -> tuple[Mapping[str, Operator], Mapping[str, Operator]]:
        roles = Training(chosen, load_model(chosen, path), Recorders([]))
        try:
            if recipe is None:
                await roles.learner.load(Path(path))
            await roles.learner.publish(1)
            await roles.engine.update_weights(1)
            learner = await roles.learner.operators()
            return await roles.engine.operators(sorted(learner)), learner
        finally:
            await roles.close()

    with console.status("loading both sides"):
        engine, learner = asyncio.run(run())
    for line in listing(engine, learner):
        console.print(line, highlight=False)
    if found := differences(engine, learner, aligned=True):
        asked = ", as learner.alignment = none asks" if chosen.learner.alignment == "none" else ""
        raise AuditFailed(f"{len(found)} of {len(learner)} weights differ{asked}: {found[0]}")
    console.print(f"{len(learner)} weights: same bytes, same format, same kernel on both sides")


def listing(engine: Mapping[str, Operator], learner: Mapping[str, Operator]) -> Iterator[Text]:
    """Weights under what runs them: names are long, and most weights of a model run the same way.

    The same weight of several layers has a line for all: `model.layers.*.mlp.up_proj.weight  ×28`.
    """
    found: dict[tuple[str, str, bool], Counter[str]] = {}
    for name, ours in learner.items():
        theirs = engine[name]
        runs = (_runs(theirs), _runs(ours), theirs.digest == ours.digest)
        found.setdefault(runs, Counter())[re.sub(r"\.\d+\.", ".*.", name)] += 1
    for (sampler, ours, same), names in found.items():
        yield _heading(sampler, ours, same)
        yield from (Text(f"  {name}  ×{number}") for name, number in names.items())


def _heading(sampler: str, learner: str, same_bytes: bool) -> Text:
    alike = sampler == learner
    runs = f"{sampler} on both sides" if alike else f"{sampler} in the sampler, {learner} in the learner"
    published = "same bytes sent" if same_bytes else "bytes sent differ"
    return Text(f"{runs}; {published}", style="bold" if alike and same_bytes else "bold red")


def _runs(operator: Operator) -> str:
    return operator.format if operator.kernel == "torch" else f"{operator.format}, {operator.kernel}"
