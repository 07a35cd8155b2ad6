"""`lockstep audit`: what sampler and learner run, layer by layer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Column, Table

from lockstep.assembly.roles import Training, load_model
from lockstep.cli.inference import checkpoint_and_recipe
from lockstep.controller.audit import AuditFailed, differences
from lockstep.report.recorder import Recorders
from lockstep.types import Operator


def audit(checkpoint: str, overrides: Sequence[str], *, recipe: str | None, console: Console) -> None:
    """Builds both sides as training would, publishes once, and compares. Raises AuditFailed on any difference."""
    path, chosen = checkpoint_and_recipe(checkpoint, overrides, recipe, console)

    async def run() -> tuple[Mapping[str, Operator], Mapping[str, Operator]]:
        roles = Training(chosen, load_model(chosen, path), Recorders([]))
        try:
            await roles.learner.publish(1)
            await roles.engine.update_weights(1)
            learner = await roles.learner.operators()
            return await roles.engine.operators(sorted(learner)), learner
        finally:
            await roles.close()

    with console.status("loading both sides"):
        engine, learner = asyncio.run(run())
    console.print(_table(engine, learner))
    if found := differences(engine, learner, aligned=True):
        asked = ", as learner.alignment = none asks" if chosen.learner.alignment == "none" else ""
        raise AuditFailed(f"{len(found)} of {len(learner)} weights differ{asked}: {found[0]}")
    console.print(f"{len(learner)} weights: same bytes, same format, same kernel on both sides")


def _table(engine: Mapping[str, Operator], learner: Mapping[str, Operator]) -> Table:
    """Layers that run the same way share a row: `model.layers.*.mlp.up_proj.weight`, 28 of them."""
    rows: dict[tuple[str, str, str], list[bool]] = {}
    for name, ours in learner.items():
        theirs = engine[name]
        key = (re.sub(r"\.\d+\.", ".*.", name), _runs(theirs), _runs(ours))
        rows.setdefault(key, []).append(theirs.digest == ours.digest)
    table = Table(Column("weight", overflow="fold"), "layers", "sampler runs", "learner runs", "published bytes")
    for (name, sampler, learner_runs), same in rows.items():
        alike = "the same" if sampler == learner_runs else f"[red]{learner_runs}[/red]"
        bytes_ = "the same" if all(same) else f"[red]{same.count(False)} differ[/red]"
        table.add_row(name, str(len(same)), sampler, alike, bytes_)
    return table


def _runs(operator: Operator) -> str:
    return operator.format if operator.kernel == "torch" else f"{operator.format}, {operator.kernel}"
