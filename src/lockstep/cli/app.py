"""The commands, each a few lines over assembly/ and report/. Heavy imports wait until a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.analyze import analyze
from lockstep.cli.bench import bench
from lockstep.cli.options import Overrides, console, require_replaceable

app = typer.Typer(
    name="lockstep",
    help="Reinforcement-learning post-training of language models, with sampler and learner in lockstep.\n\n"
    "Start with `lockstep train quickstart`, then look at runs/quickstart/report.html. A recipe is a TOML file; "
    "`lockstep recipes` lists the ones that come along, and any key can be set on the command line: "
    "`lockstep train quickstart train.steps=50 learner.learning_rate=1e-4`.\n\n"
    "Exit codes: 0 done, 1 the run failed, 2 bad input, 3 stopped by the governor, "
    "130 stopped on request (both saved, can be resumed).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

RecipeArgument = Annotated[str | None, typer.Argument(help="a recipe's name (see `lockstep recipes`) or a TOML file")]
RunsOption = Annotated[Path, typer.Option("--runs", help="folder that holds the runs")]


@app.command()
def train(
    recipe: RecipeArgument = None,
    overrides: Overrides = None,
    resume: Annotated[Path | None, typer.Option(help="go on with this run from its last checkpoint")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the resolved config and a memory estimate")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="one line per step instead of the live view")] = False,
    runs: RunsOption = Path("runs"),
) -> None:
    """Train a model: a checkpoint and a reward go in, a better checkpoint comes out.

    The run is kept in runs/NAME: config, metrics, samples with their rewards and reasons, checkpoints in Hugging Face
    format, and report.html. Ctrl-C saves and stops; `--resume runs/NAME` goes on, also after a crash.

    Examples:

    * `lockstep train quickstart`
    * `lockstep train my.toml name=trial-2 train.max_staleness=1`
    * `lockstep train quickstart name=gspo preset=gspo`
    * `lockstep train --resume runs/trial-2`
    """
    from lockstep.cli import training

    training.train(recipe, overrides or [], resume=resume, dry_run=dry_run, plain=plain, runs=runs, console=console)


@app.command("eval")
def evaluate(
    checkpoint: Annotated[
        str, typer.Argument(help="a run (its best checkpoint is taken), or a Hugging Face checkpoint")
    ],
    overrides: Overrides = None,
    recipe: Annotated[str | None, typer.Option(help="recipe that names the task; not needed for a run")] = None,
    show: Annotated[int, typer.Option(help="print this many answers with the reward's reasons")] = 3,
) -> None:
    """Evaluate a checkpoint on a task's held-out problems: greedy accuracy, and avg@k / pass@k with `eval.k=8`.

    Examples:

    * `lockstep eval runs/quickstart eval.k=8`
    * `lockstep eval path/to/model --recipe gsm8k`
    """
    from lockstep.cli import inference

    inference.evaluate(checkpoint, overrides or [], recipe=recipe, show=show, console=console)


@app.command()
def generate(
    checkpoint: Annotated[
        str, typer.Argument(help="a run (its best checkpoint is taken), or a Hugging Face checkpoint")
    ],
    prompts: Annotated[list[str], typer.Argument(help="what to ask, one or more")],
    max_tokens: Annotated[int, typer.Option(help="longest answer")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    num: Annotated[int, typer.Option("-n", min=1, help="answers per prompt")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="of the sampled answers")] = 0,
) -> None:
    """Ask a checkpoint something.

    Example: `lockstep generate runs/quickstart "7+5-9=" "1+2+3="`
    """
    from lockstep.cli import inference

    inference.generate(
        checkpoint, prompts, max_tokens=max_tokens, temperature=temperature, num=num, seed=seed, console=console
    )


@app.command()
def export(
    checkpoint: Annotated[
        str, typer.Argument(help="a run (its best checkpoint is taken), or a Hugging Face checkpoint")
    ],
    out: Annotated[Path, typer.Argument(help="folder to make")],
    precision: Annotated[
        str | None,
        typer.Option(
            help="int8_w8a8, fp8_w8a8, w4a16 or w4a8, options after colons: fp8_w8a8:block=true; "
            "by default what the run sampled in"
        ),
    ] = None,
) -> None:
    """Write a checkpoint in low bits (compressed-tensors), for vLLM and transformers to load.

    A run's codes are made from its float32 master weights: the very codes it samples with in that precision. The
    high-precision checkpoint is the folder you start from. To load the result, transformers needs
    `pip install compressed-tensors`.

    Examples:

    * `lockstep export runs/aligned runs/aligned-w4a16`
    * `lockstep export runs/quickstart quickstart-w4a16 --precision w4a16`
    * `lockstep export path/to/model model-fp8 --precision fp8_w8a8:block=true`
    """
    from lockstep.cli.exporting import export_checkpoint

    export_checkpoint(checkpoint, out, precision, console)


@app.command()
def audit(
    checkpoint: Annotated[
        str, typer.Argument(help="a run (its best checkpoint is taken), or a Hugging Face checkpoint")
    ],
    overrides: Overrides = None,
    recipe: Annotated[str | None, typer.Option(help="how it is to be trained; not needed for a run")] = None,
) -> None:
    """Show what sampler and learner run, layer by layer (format, kernel, bytes); exit code 1 if they differ anywhere.

    Training does the same before its first step and, on a few layers, after every weight sync.

    Examples:

    * `lockstep audit runs/quickstart`
    * `lockstep audit path/to/model --recipe gsm8k rollout.precision=w4a16`
    """
    from lockstep.cli import audit as command

    command.audit(checkpoint, overrides or [], recipe=recipe, console=console)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="one run, or several to compare")],
    out: Annotated[Path | None, typer.Option(help="where a comparison is written: comparison.html")] = None,
) -> None:
    """Draw a run (report.html and plots/ in its folder), or several on the same axes.

    A run that still goes on is drawn as far as it has come: reload the page after the command.

    Examples:

    * `lockstep report runs/quickstart`
    * `lockstep report runs/quickstart runs/trial-2 --out both.html`
    """
    from lockstep.config import ConfigError
    from lockstep.report.page import write_comparison, write_report
    from lockstep.report.run_folder import RunFolder

    folders, page = [RunFolder.open(run) for run in runs], out or Path("comparison.html")
    if len(folders) == 1:
        if out is not None:
            raise ConfigError(f"--out is for a comparison of several runs; this one's report is {folders[0].report}")
        require_replaceable(folders[0].report)
        path = write_report(folders[0])
    else:
        if page.resolve() in [folder.report.resolve() for folder in folders]:
            raise ConfigError(f"--out {page} is the report of one of these runs")
        require_replaceable(page)
        path = write_comparison(folders, page)
    console.print(f"wrote {path}", highlight=False)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="print this recipe")] = None,
) -> None:
    """List the recipes that come along, or print one: `lockstep recipes quickstart > my.toml`."""
    from lockstep.cli import recipe_files
    from lockstep.config.loading import read_text

    if name:
        console.print(read_text(recipe_files.find(name)), end="", markup=False, highlight=False, soft_wrap=True)
        return
    console.print(recipe_files.listed(), highlight=False)


def _explainable(incomplete: str) -> list[str]:
    from lockstep.cli.explainable import names

    return [name for name in names() if name.startswith(incomplete)]


@app.command()
def explain(
    name: Annotated[
        str | None,
        typer.Argument(help="a method, preset, rule or metric; all are listed without it", autocompletion=_explainable),
    ] = None,
) -> None:
    """Explain a method: its equation, options and defaults, what it goes with and refuses, its paper and its code.

    Knows surrogates, corrections, advantages, reductions, KL estimators, low-bit formats, optimisers, presets, the
    governor with its actions and rules, and metrics.

    Examples:

    * `lockstep explain`
    * `lockstep explain tbpo`
    * `lockstep explain lower_rate`
    * `lockstep explain mismatch/k3`
    """
    from lockstep.cli.explain import explain

    explain(name, console)


@app.command()
def doctor() -> None:
    """Say what is installed, which device would be used and in which precision, and why not something faster."""
    from lockstep.cli.doctor import examine

    examine(console)


app.add_typer(analyze, name="analyze")
app.add_typer(bench, name="bench")
