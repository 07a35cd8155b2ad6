"""The commands `lockstep analyze …`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.options import Overrides, console

analyze = typer.Typer(help="Look closely at a model.", no_args_is_help=True)


@analyze.callback()
def _group() -> None:
    """So that its one command keeps its name."""


@analyze.command("routing")
def analyze_routing(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            help="a run (its best checkpoint is taken), or a Hugging Face checkpoint; without one, a tiny mixture is "
            "made and warmed up on the quickstart's task"
        ),
    ] = None,
    overrides: Overrides = None,
    recipe: Annotated[str | None, typer.Option(help="whose task asks the questions; not needed for a run")] = None,
    ask: Annotated[list[str] | None, typer.Option(help="ask this instead, any number of times")] = None,
    samples: Annotated[int, typer.Option(min=1, help="held-out problems of the task")] = 64,
    answers: Annotated[int, typer.Option("-n", min=1, help="answers to each prompt")] = 4,
    warmup: Annotated[int, typer.Option(min=1, help="supervised updates of the tiny mixture")] = 200,
    out: Annotated[Path | None, typer.Option(help="folder; by default `routing`, in the run if there is one")] = None,
) -> None:
    """Where sampler and learner of a mixture choose other experts, and what replaying them changes (R3, Section 3).

    The embedded engine samples in `rollout.precision` and records its experts; the learner scores the same tokens with
    its own experts, with the recorded ones, and once more for the floor. Prints KL, F(τ) and the routers that differ;
    writes report.html, study.json and pictures.

    Examples:

    * `lockstep analyze routing`
    * `lockstep analyze routing runs/mixture rollout.precision=w4a16 learner.alignment=none`
    * `lockstep analyze routing path/to/model --ask "Why is the sky blue?" rollout.max_tokens=512`
    """
    from lockstep.cli import analyze_routing as command

    if checkpoint is not None and "=" in checkpoint:  # an override: no checkpoint was named
        checkpoint, overrides = None, [checkpoint, *(overrides or [])]
    command.analyze(
        checkpoint,
        overrides or [],
        recipe=recipe,
        asked=ask or [],
        samples=samples,
        answers=answers,
        warmup=warmup,
        out=out,
        console=console,
    )
