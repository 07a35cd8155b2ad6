"""The commands `lockstep bench …`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.options import Overrides, console, require_writable

bench = typer.Typer(
    help="Measure Lockstep on this machine: against other libraries (trl, rollout), and what its parts cost.",
    no_args_is_help=True,
)


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
    require_writable(json)
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
        float, typer.Option(min=1, max=100, help="norms times this, the matrices that read them divided by it")
    ] = 1.5,
    steps: Annotated[int, typer.Option(min=2, help="steps of RL per arm")] = 20,
    precision: Annotated[str, typer.Option(help="format whose codes are counted")] = "int8_w8a8",
) -> None:
    """Update-aware scaling (QuRL) in three arms on the quickstart's task: none, scaled weights, scaled learning rates.

    Shows the share of low-bit codes that the scale itself changes, that every step changes, and the reward. In 8 bits
    the scale changes none, or a few in a million on a tie; w4a16 and w4a8 round their scales to bfloat16, which changes
    a few in a thousand.
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
    out: Annotated[Path | None, typer.Option(help="put the tables into this page, in place of its own")] = None,
) -> None:
    """Low-bit linear layers and experts against bfloat16 and against the time to read their weights. Needs a GPU.

    First a block as the embedded engine runs it, with the norms and the gate that encode the layers' inputs.
    """
    require_writable(out)
    from lockstep.cli import bench_aligned, bench_block, bench_linear

    if learner:
        bench_aligned.compare(rows or [2048, 4096, 16384], out, console)
    else:
        tokens, device = rows or [16, 64, 256], bench_linear.gpu()
        bench_linear.show(bench_block.tables(tokens, device) | bench_linear.tables(tokens, device), out, console)


@bench.command("mismatch")
def bench_mismatch(
    models: Annotated[list[str] | None, typer.Argument(help="dense, mixture (by default these), long")] = None,
    steps: Annotated[int, typer.Option(min=1, help="steps of RL per line, after a first one")] = 4,
    warmup: Annotated[int, typer.Option(min=1, help="supervised updates before them, once per model")] = 200,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; in bfloat16 on a GPU, in float32 on a CPU")] = "cpu",
    float32_logits: Annotated[
        bool, typer.Option("--float32-logits", help="with model.float32_logits = true; on a CPU nothing is rounded")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="keep the tables here, as Markdown")] = None,
    json: Annotated[Path | None, typer.Option(help="keep the result here")] = None,
) -> None:
    """Every low-bit format: the gap between sampler and learner, aligned and not, and what a sync costs.

    A tiny dense model and a tiny mixture make real training steps; k3, F(2) and the largest weight are measured after
    updates. So does, if named, `long`: 8 layers with random weights, whose answers have 600 tokens. On a GPU there is
    also what rollout.exact = true leaves. On a CPU a sync is timed through copies and in shared memory, with the bytes
    it publishes; on a GPU that is what `lockstep bench sync` does.
    """
    require_writable(out, json)
    from lockstep.cli import bench_mismatch
    from lockstep.cli.benchmarks import require_page
    from lockstep.cli.rollout_processes import ended_by_signals

    require_page(out)
    with ended_by_signals():
        bench_mismatch.compare(
            models or (),
            device=device,
            steps=steps,
            warmup=warmup,
            float32_logits=float32_logits,
            out=out,
            json_out=json,
            console=console,
        )


@bench.command("rollout")
def bench_rollout(
    engines: Annotated[
        list[str] | None,
        typer.Argument(help="lockstep, vllm, generate, continuous; options after colons: lockstep:precision=fp8_w8a8"),
    ] = None,
    shape: Annotated[str, typer.Option(help="tiny, 0.6b, 8b or 30b-a3b: Qwen3's, with random weights")] = "0.6b",
    layers: Annotated[int | None, typer.Option(min=1, help="fewer than the shape has")] = None,
    workload: Annotated[
        list[str] | None, typer.Option(help="256x128+256, 64x8x512+2048, 32x1024+1024, 8x4x16+32, 16x32+64")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="of every engine, on a CPU; their own choice else")] = None,
    out: Annotated[Path | None, typer.Option(help="append the table here, as Markdown")] = None,
) -> None:
    """Engines on the same prompts, lengths and weights: tokens per second, share of the memory limit, start-up.

    A workload is prompts x samples x prompt tokens + answer tokens. Each engine runs in a process of its own; answers
    are checked for sanity and their log-probs against a full forward of plain transformers. On a GPU, W and MHz are
    the mean power and clock of the run that counts: a board at its power cap lowers its clock.

    Options of lockstep: precision, kv, exact, compile, record, step_tokens, max_seqs, kv_gib; of vllm: multiprocessing,
    async_scheduling, quantization, kv, dtype, max_seqs, python. With lockstep:kv=fp8 and vllm:kv=fp8 both keep keys
    and values in 8 bits.
    """
    require_writable(out)
    from lockstep.cli import bench_rollout

    workloads, engines = workload or ["256x128+256"], engines or ["lockstep", "generate"]
    bench_rollout.compare(shape, layers, workloads, engines, out, console, threads=threads)


@bench.command("sync")
def bench_sync(
    shape: Annotated[str, typer.Option(help="tiny, 0.6b, 8b or 30b-a3b: Qwen3's, with random weights")] = "0.6b",
    layers: Annotated[int | None, typer.Option(min=1, help="fewer than the shape has")] = None,
    precision: Annotated[list[str] | None, typer.Option(help="of the engine; high and every format by default")] = None,
    out: Annotated[Path | None, typer.Option(help="keep the table here, as Markdown")] = None,
) -> None:
    """New weights for a running engine: time and bytes of quantizing and copying them, for every format.

    And what sleeping gives back and takes. After both the engine must answer as one started on the new weights.
    """
    require_writable(out)
    from lockstep.cli import bench_sync
    from lockstep.cli.benchmarks import require_page

    require_page(out)
    bench_sync.compare(shape, layers, precision or [], out, console)


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
    require_writable(out, json)
    from lockstep.cli import bench_routing
    from lockstep.cli.benchmarks import require_page
    from lockstep.cli.rollout_processes import ended_by_signals

    require_page(out)
    with ended_by_signals():
        bench_routing.compare(samples=samples, warmup=warmup, out=out, json_out=json, console=console)


@bench.command("routing-cost")
def bench_routing_cost(
    shape: Annotated[str, typer.Option(help="tiny, or 30b-a3b: the width of Qwen3-30B-A3B, random weights")] = "tiny",
    layers: Annotated[int, typer.Option(min=1, max=256, help="how many of them")] = 4,
    seqs: Annotated[int, typer.Option(min=1, max=4096, help="answers at a time")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="of each prompt")] = 64,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="sampled per answer; with the prompt, at most what the shape has for context")
    ] = 64,
    pairs: Annotated[int, typer.Option(min=1, help="learner steps with and without replay, in turns")] = 10,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="keep the table here, as Markdown")] = None,
) -> None:
    """What recording experts costs the sampler and replaying them the learner: bytes per token, and time as a share.

    Every step runs with and without, in turns, in one process; medians of their ratios are shown.
    """
    require_writable(out)
    from lockstep.cli import bench_routing_cost as command
    from lockstep.cli.benchmarks import require_page

    require_page(out)
    size = command.Size(seqs=seqs, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
    command.compare(shape, layers, size, pairs=pairs, device=device, out=out, console=console)
