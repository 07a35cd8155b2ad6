"""The commands, each a few lines over assembly/ and report/. Heavy imports wait until a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.analyze import analyze
from lockstep.cli.options import Overrides, console

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
    num: Annotated[int, typer.Option("-n", help="answers per prompt")] = 1,
    seed: Annotated[int, typer.Option(help="of the sampled answers")] = 0,
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
        str | None, typer.Option(help="int8_w8a8, fp8_w8a8, w4a16 or w4a8; by default what the run sampled in")
    ] = None,
) -> None:
    """Write a checkpoint in low bits (compressed-tensors), for vLLM and transformers to load.

    A run's codes are made from its float32 master weights: the very codes it samples with in that precision. The
    high-precision checkpoint is the folder you start from. To load the result, transformers needs
    `pip install compressed-tensors`.

    Examples:

    * `lockstep export runs/aligned runs/aligned-w4a16`
    * `lockstep export runs/quickstart quickstart-w4a16 --precision w4a16`
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
    out: Annotated[Path, typer.Option(help="where a comparison is written")] = Path("comparison.html"),
) -> None:
    """Draw a run (report.html and plots/ in its folder), or several on the same axes."""
    from lockstep.report.page import write_comparison, write_report
    from lockstep.report.run_folder import RunFolder

    folders = [RunFolder.open(run) for run in runs]
    path = write_report(folders[0]) if len(folders) == 1 else write_comparison(folders, out)
    console.print(f"wrote {path}", highlight=False)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="print this recipe")] = None,
) -> None:
    """List the recipes that come along, or print one: `lockstep recipes quickstart > my.toml`."""
    from lockstep.cli import recipe_files

    if name:
        console.print(recipe_files.find(name).read_text(), end="", markup=False, highlight=False, soft_wrap=True)
        return
    for path in recipe_files.packaged():
        console.print(f"[bold]{path.stem:16}[/bold] {recipe_files.first_comment(path)}", highlight=False)


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

bench = typer.Typer(help="Measure Lockstep side by side with others, on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command("trl")
def bench_trl(
    settings: Annotated[list[str] | None, typer.Argument(help="mixed, short, long, prompt; all by default")] = None,
    steps: Annotated[int, typer.Option(min=1, help="measured steps per side; the median counts")] = 7,
    warmup: Annotated[int, typer.Option(min=0, help="steps before them, not measured")] = 1,
    threads: Annotated[int | None, typer.Option(min=1, help="per side; as many as cores by default")] = None,
    continuous: Annotated[
        bool, typer.Option("--continuous-batching", help="also TRL with transformers' continuous batching")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="keep the result here")] = None,
) -> None:
    """The same GRPO run under TRL's GRPOTrainer and under Lockstep, on the CPU, in turns: samples per second of both.

    Same tiny model, prompts, group size, answer lengths, loss and update. Needs `pip install "lockstep-rl[bench]"`.
    """
    from lockstep.cli import bench_trl

    bench_trl.compare(
        settings or [],
        steps=steps,
        warmup=warmup,
        threads=threads,
        continuous=continuous,
        out=json,
        console=console,
    )


@bench.command("diagnostics")
def bench_diagnostics(
    settings: Annotated[list[str] | None, typer.Argument(help="quickstart, larger, updates; all by default")] = None,
    pairs: Annotated[int, typer.Option(min=2, help="steps with and without diagnostics, in turns")] = 15,
    threads: Annotated[int | None, typer.Option(min=1, help="as many as cores by default")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "cpu",
) -> None:
    """What measuring the mismatch costs: training steps with and without diagnostics, in turns, in one process."""
    from lockstep.cli import bench_diagnostics

    bench_diagnostics.compare(settings or [], pairs=pairs, threads=threads, device=device, console=console)


@bench.command("scaling")
def bench_scaling(
    overrides: Overrides = None,
    scale: Annotated[
        float, typer.Option(min=1, help="norms times this, the matrices that read them divided by it")
    ] = 1.5,
    steps: Annotated[int, typer.Option(min=2, help="steps of RL per arm")] = 20,
    precision: Annotated[str, typer.Option(help="format whose codes are counted")] = "int8_w8a8",
) -> None:
    """Update-aware scaling (QuRL) in three arms on the quickstart's task: none, scaled weights, scaled learning rates.

    Shows the share of low-bit codes that the scale itself changes (none), that every step changes, and the reward.
    """
    from lockstep.cli import bench_scaling

    bench_scaling.compare(scale=scale, steps=steps, precision=precision, overrides=overrides or [], console=console)


@bench.command("linear")
def bench_linear(
    rows: Annotated[
        list[int] | None,
        typer.Argument(min=1, help="tokens per pass; by default 16, 64 and 256, a learner's 2048, 4096 and 16384"),
    ] = None,
    learner: Annotated[bool, typer.Option("--learner", help="forward and backward of an aligned learner")] = False,
    out: Annotated[Path | None, typer.Option(help="keep the tables here, as Markdown")] = None,
) -> None:
    """Low-bit linear layers and experts against bfloat16 and against the time to read their weights. Needs a GPU."""
    from lockstep.cli import bench_aligned, bench_linear

    if learner:
        bench_aligned.compare(rows or [2048, 4096, 16384], out, console)
    else:
        bench_linear.compare(rows or [16, 64, 256], out, console)


@bench.command("mismatch")
def bench_mismatch(
    steps: Annotated[int, typer.Option(min=1, help="steps of RL per line, after a first one")] = 4,
    warmup: Annotated[int, typer.Option(min=1, help="supervised updates before them, once per model")] = 200,
    out: Annotated[Path | None, typer.Option(help="keep the tables here, as Markdown")] = None,
    json: Annotated[Path | None, typer.Option(help="keep the result here")] = None,
) -> None:
    """Every low-bit format on the CPU: the gap between sampler and learner, aligned and not, and what a sync costs.

    A tiny dense model and a tiny mixture make real training steps; k3, F(2) and the largest weight are measured after
    updates. A sync is timed through copies and in shared memory, with the bytes it publishes.
    """
    from lockstep.cli import bench_mismatch

    bench_mismatch.compare(steps=steps, warmup=warmup, out=out, json_out=json, console=console)


@bench.command("rollout")
def bench_rollout(
    engines: Annotated[
        list[str] | None,
        typer.Argument(help="lockstep, vllm, generate, continuous; options after colons: lockstep:precision=fp8_w8a8"),
    ] = None,
    shape: Annotated[str, typer.Option(help="tiny, 0.6b, 8b or 30b-a3b: Qwen3's, with random weights")] = "0.6b",
    layers: Annotated[int | None, typer.Option(min=1, help="fewer than the shape has")] = None,
    workload: Annotated[
        list[str] | None, typer.Option(help="256x128+256, 64x8x512+2048, 32x1024+1024, 8x4x16+32")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="append the table here, as Markdown")] = None,
) -> None:
    """Engines on the same prompts, lengths and weights: tokens per second, share of the memory limit, start-up.

    A workload is prompts x samples x prompt tokens + answer tokens. Each engine runs in a process of its own; answers
    are checked for sanity and their log-probs against a full forward of plain transformers.
    """
    from lockstep.cli import bench_rollout

    bench_rollout.compare(shape, layers, workload or ["256x128+256"], engines or ["lockstep", "generate"], out, console)


@bench.command("routing")
def bench_routing(
    samples: Annotated[int, typer.Option(min=1, help="prompts, four answers each")] = 64,
    warmup: Annotated[int, typer.Option(min=1, help="supervised updates of the tiny mixture, once")] = 200,
    out: Annotated[Path | None, typer.Option(help="keep the table here, as Markdown")] = None,
    json: Annotated[Path | None, typer.Option(help="keep the result here")] = None,
) -> None:
    """Every low-bit format on a tiny mixture, on the CPU: k3 and F(2) with and without replay of the sampler's experts.

    The same tokens are scored both ways, by a learner in high precision and by an aligned one.
    """
    from lockstep.cli import bench_routing

    bench_routing.compare(samples=samples, warmup=warmup, out=out, json_out=json, console=console)


@bench.command("routing-cost")
def bench_routing_cost(
    shape: Annotated[str, typer.Option(help="tiny, or 30b-a3b: the width of Qwen3-30B-A3B, random weights")] = "tiny",
    layers: Annotated[int, typer.Option(min=1, help="how many of them")] = 4,
    seqs: Annotated[int, typer.Option(min=1, help="answers at a time")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="of each prompt")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="sampled per answer")] = 64,
    pairs: Annotated[int, typer.Option(min=1, help="learner steps with and without replay, in turns")] = 10,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="keep the table here, as Markdown")] = None,
) -> None:
    """What recording experts costs the sampler and replaying them the learner: bytes per token, and time as a share.

    Every step runs with and without, in turns, in one process; medians of their ratios are shown.
    """
    from lockstep.cli import bench_routing_cost as command

    size = command.Size(seqs=seqs, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
    command.compare(shape, layers, size, pairs=pairs, device=device, out=out, console=console)
