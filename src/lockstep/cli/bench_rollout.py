"""`lockstep bench rollout`: engines on the same prompts, lengths and weights, each in a process of its own."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig

from lockstep.cli.gpu_clocks import Sample, means, sampled
from lockstep.cli.rollout_engines import ENGINES, FLAGS, OPTIONS, Answer, Ask, plain_model, rollout_config
from lockstep.cli.rollout_processes import (
    PROGRESS,
    REFUSED,
    RESULT,
    EngineError,
    ended_by_signals,
    has_module,
    tell,
    told_by,
)
from lockstep.cli.rollout_workloads import SHAPES, WORKLOADS, Workload, checkpoint, rescore, weight_bytes
from lockstep.config import ConfigError
from lockstep.config.layers import parse_value

LONG, SHORT = 10.0, 2.0  # seconds: what takes less is timed twice, or for so long, and the best one counts
SCORED = 4  # answers that are held against a full forward


@dataclass(frozen=True, slots=True)
class Result:
    engine: str
    workload: str
    tokens: int  # drawn
    seconds: float  # prompts and answers
    prefill_seconds: float  # the same with one token each
    limit_seconds: float  # of decoding
    steps: int  # longest answer
    gib: float  # of the device, in use at the end
    start_seconds: float  # from a checkpoint to the first request
    difference: float | None  # mean |log-prob − that of plain transformers|, nats; None: the engine returns none
    cpu_seconds: float = 0.0  # of this process, all threads: what others on a busy machine change least
    begun: float = 0.0  # time.monotonic(), which is the same clock in every process
    watts: float | None = None  # of the device meanwhile, mean; None: unknown
    mhz: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.tokens / self.cpu_seconds

    @property
    def decode_seconds(self) -> float | None:
        """None where starting a run takes so long that it hides the answers."""
        return self.seconds - self.prefill_seconds if self.seconds > self.prefill_seconds else None

    @property
    def decode_ms(self) -> float | None:
        return self.decode_seconds and self.decode_seconds / max(1, self.steps - 1) * 1e3

    @property
    def of_limit(self) -> float | None:
        return self.decode_seconds and self.limit_seconds / self.decode_seconds


def run_engine(engine: str, folder: Path, workloads: Sequence[Workload], options: dict[str, Any]) -> Iterator[Result]:
    """In this process: starts one engine and takes it through the workloads. Each result comes when it is measured, and
    again when its log-probs have been held against plain transformers, which takes memory and time."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = AutoConfig.from_pretrained(folder)
    begun = time.perf_counter()
    answer = ENGINES[engine](folder, device, options)
    start = time.perf_counter() - begun
    tell(PROGRESS, f"{engine} started in {start:.0f} s")
    measured = []
    for workload in workloads:
        run, prefill = _measure(answer, workload.requests(config.vocab_size), config.vocab_size)
        result = Result(
            engine=engine,
            workload=workload.name,
            tokens=sum(len(tokens) for tokens, _ in run.answers),
            seconds=run.seconds,
            prefill_seconds=prefill,
            limit_seconds=workload.limit_seconds(config, weight_bytes(folder), config.vocab_size),
            steps=max(len(tokens) for tokens, _ in run.answers),
            gib=_gib_in_use(device),
            start_seconds=start,
            difference=None,
            cpu_seconds=run.cpu_seconds,
            begun=run.begun,
        )
        tell(PROGRESS, f"{engine} {workload.name}: {result.tokens_per_s:,.0f} tok/s")
        yield result
        measured.append((result, run.answers, workload))
    module = plain_model(folder, device)
    for result, answers, workload in measured:
        yield replace(result, difference=_difference(answers, workload.requests(config.vocab_size), module))


def _measure(answer: Any, requests: Sequence[Ask], vocab: int) -> tuple[Run, float]:
    """The run that counts, and seconds of the same prompts with one token each."""
    answer([(prompt, min(n, 24)) for prompt, n in requests])  # whatever is compiled on first use
    first = [(prompt, 1) for prompt, _ in requests]
    prefill, run = _timed(answer, first), _best(answer, requests)
    _require_lengths(prefill.answers, first, vocab)
    _require_lengths(run.answers, requests, vocab)
    if len({tuple(tokens[:16]) for tokens, _ in run.answers}) < len(run.answers) // 2:
        raise RuntimeError("more than half of the answers begin alike")
    return run, prefill.seconds


@dataclass(frozen=True, slots=True)
class Run:
    begun: float
    seconds: float
    cpu_seconds: float
    answers: list[Answer]


def _timed(answer: Any, requests: Sequence[Ask]) -> Run:
    begun, cpu_begun = time.monotonic(), time.process_time()
    answers = answer(requests)
    return Run(begun, time.monotonic() - begun, time.process_time() - cpu_begun, answers)


def _best(answer: Any, requests: Sequence[Ask]) -> Run:
    """Of what is over in a tenth of a second, single runs differ by half on a machine that others use."""
    runs = [_timed(answer, requests)]
    while sum(run.seconds for run in runs) < SHORT or (len(runs) == 1 and runs[0].seconds < LONG):
        runs.append(_timed(answer, requests))
    return min(runs, key=lambda run: run.seconds)


def _difference(answers: list[Answer], requests: Sequence[Ask], module: Any) -> float | None:
    """Of the first answers' log-probs from those of plain transformers; None if the engine returns none."""
    if not answers[0][1]:
        return None
    pairs = [
        (logp, rescore(module, prompt, tokens))
        for (tokens, logp), (prompt, _) in list(zip(answers, requests, strict=True))[:SCORED]
    ]
    return fmean(abs(x - y) for logp, found in pairs for x, y in zip(logp, found, strict=True))


def _require_lengths(answers: Sequence[Answer], requests: Sequence[Ask], vocab: int) -> None:
    for (tokens, logp), (_, length) in zip(answers, requests, strict=True):
        if len(tokens) != length or not all(0 <= t < vocab for t in tokens) or any(not x <= 0 for x in logp):
            raise RuntimeError(
                f"an answer of {len(tokens)} tokens where {length} were asked for, or not of the vocabulary"
            )


def _gib_in_use(device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def compare(
    shape: str,
    layers: int | None,
    workloads: Sequence[str],
    engines: Sequence[str],
    out: Path | None,
    console: Console,
    *,
    threads: int | None = None,
) -> None:
    """`engines` are names, with options after colons: `vllm:multiprocessing=0`. What was measured is shown and kept
    even if an engine fails or somebody ends it all."""
    names = list(dict.fromkeys(known("workload", workloads, WORKLOADS)))
    known("shape", [shape], SHAPES)
    for engine in engines:
        _require_runnable(engine)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    context = max(WORKLOADS[name].context for name in names)
    results: dict[tuple[int, str], Result] = {}  # by place of the engine, and workload
    try:
        with (
            ended_by_signals(),
            checkpoint(SHAPES[shape], layers, context, device) as folder,
            sampled(device) as samples,
        ):
            torch.cuda.empty_cache()
            for place, engine in enumerate(engines):
                told = _in_process(engine, folder, names, threads, console)
                with console.status(f"{engine} …"), closing(told):  # ends the process before its checkpoint goes
                    for result in told:
                        results[place, result.workload] = _with_clocks(result, samples)
    except EngineError as failed:
        console.print(str(failed), markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(1) from None
    finally:
        if results:
            size = f"{shape}{f', {layers} layers' if layers else ''}{f', {threads} thread(s)' if threads else ''}"
            _keep(f"{size}, {device_name()}\n\n{table([*results.values()])}\n", out, console)


def _keep(text: str, out: Path | None, console: Console) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    if out:
        with out.open("a") as file:
            file.write(text + "\n")


def _require_runnable(engine: str) -> None:
    name, settings = engine.partition(":")[0], _settings(engine)
    known("engine", [name], ENGINES)
    known(f"option of {name}", [*settings], OPTIONS[name])
    for flag in FLAGS & {*settings}:
        if settings[flag] not in (True, False):
            raise ConfigError(f"{engine}: {flag}={settings[flag]} is neither true nor false")
    if name == "lockstep":
        rollout_config({"max_seqs": 1, "kv_gib": 1.0} | settings)
    elif "python" in settings:
        _require_vllm(engine, str(settings["python"]))
    elif name == "vllm" and not find_spec("vllm"):
        raise ConfigError("vllm is not installed here; vllm:python=PATH names an interpreter that has it")


def _require_vllm(engine: str, python: str) -> None:
    if shutil.which(python) is None:
        raise ConfigError(f"{engine}: there is no interpreter {python}")
    if not has_module(python, "vllm"):
        raise ConfigError(f"{engine}: vllm is not installed for {python}")


def known(kind: str, names: Sequence[str], known: Collection[str]) -> Sequence[str]:
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown {kind} {name!r}; choices: {', '.join(known) or 'none'}")
    return names


def _in_process(
    engine: str, folder: str, names: Sequence[str], threads: int | None, console: Console
) -> Generator[Result, None, None]:
    python = str(_settings(engine).get("python", sys.executable))
    command = [python, "-m", "lockstep.cli.bench_rollout", engine, folder, *names]
    with closing(told_by(engine, command, threads)) as told:
        for kind, what in told:
            if kind == RESULT:
                yield Result(**what)
            else:
                console.print(what, markup=False, highlight=False)


def _with_clocks(result: Result, samples: Sequence[Sample]) -> Result:
    watts, mhz = means(samples, result.begun, result.begun + result.seconds)
    return replace(result, watts=watts, mhz=mhz)


def table(results: Sequence[Result]) -> str:
    """Markdown. What is about a GPU is left out where there was none."""
    on_gpu = any(r.gib for r in results)
    heads = ["workload", "engine", "tok/s", "× vLLM", "s", "prefill s", "ms/step"]
    heads += [*(["of the limit", "GiB", "W", "MHz"] if on_gpu else ["tok/CPU s"]), "start s", "Δ log-prob"]
    lines = [_row(heads), "|---" * len(heads) + "|"]
    for workload in dict.fromkeys(r.workload for r in results):
        rows = [r for r in results if r.workload == workload]
        base = max((r.tokens_per_s for r in rows if r.engine.startswith("vllm")), default=None)
        lines += [_row(_cells(r, base, on_gpu)) for r in rows]
    return "\n".join(lines)


def _cells(r: Result, base: float | None, on_gpu: bool) -> list[str]:
    name = ":".join(part for part in r.engine.split(":") if not part.startswith("python="))
    ratio = f"{r.tokens_per_s / base:.2f}" if base else "–"
    cells = [r.workload, name, f"{r.tokens_per_s:,.0f}", ratio, f"{r.seconds:.2f}", f"{r.prefill_seconds:.2f}"]
    cells += [_shown(r.decode_ms, ".2f"), *(_on_gpu(r) if on_gpu else [f"{r.tokens_per_cpu_s:,.0f}"])]
    return [*cells, f"{r.start_seconds:.0f}", _shown(r.difference, ".4f")]


def _on_gpu(r: Result) -> list[str]:
    return [_shown(r.of_limit, ".0%"), f"{r.gib:.0f}", _shown(r.watts, ",.0f"), _shown(r.mhz, ",.0f")]


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def device_name() -> str:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{name}, torch {torch.__version__}"


def _options(engine: str, folder: Path, workloads: Sequence[Workload]) -> dict[str, Any]:
    """Rows and pages for everything at once: no engine queues or preempts."""
    config = AutoConfig.from_pretrained(folder)
    requests = max(w.prompts * w.samples for w in workloads)
    token_bytes = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    tokens = max(w.prompts * w.samples * (w.context + 32) for w in workloads)
    options: dict[str, Any] = {
        "max_seqs": requests,
        "context": max(w.context for w in workloads),
        "kv_gib": min(70.0, 2 * tokens * token_bytes / 2**30 + 0.1),
    }
    return options | _settings(engine)


def _settings(engine: str) -> dict[str, Any]:
    """What follows an engine's name."""
    settings: dict[str, Any] = {}
    for key, _, value in (setting.partition("=") for setting in engine.split(":")[1:]):
        if key in settings:
            raise ConfigError(f"{engine}: {key} is given twice")
        settings[key] = parse_value(value)
    return settings


def main(engine: str, folder: str, *names: str) -> None:
    workloads = [WORKLOADS[name] for name in names]
    options = _options(engine, Path(folder), workloads)
    try:
        for result in run_engine(engine.partition(":")[0], Path(folder), workloads, options):
            tell(RESULT, asdict(result) | {"engine": engine})
    except ConfigError as error:
        tell(REFUSED, f"{engine}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
