"""`lockstep bench rollout`: engines on the same prompts, lengths and weights, each in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryFile
from threading import Timer
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig

import lockstep
from lockstep.cli.gpu_clocks import Sample, means, sampled
from lockstep.cli.rollout_engines import ENGINES, OPTIONS, Answer, plain_model, rollout_config
from lockstep.cli.rollout_workloads import SHAPES, WORKLOADS, Workload, checkpoint, rescore, weight_bytes
from lockstep.config import ConfigError
from lockstep.config.layers import parse_value

LONG, SHORT = 10.0, 2.0  # seconds: what takes less is timed twice, or for so long, and the best one counts
TIMEOUT = 1200.0  # seconds for one engine
PROGRESS, RESULTS = "PROGRESS ", "RESULTS "  # how lines begin by which an engine's process reports
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
    def decode_ms(self) -> float:
        return (self.seconds - self.prefill_seconds) / max(1, self.steps - 1) * 1e3

    @property
    def of_limit(self) -> float:
        return self.limit_seconds / (self.seconds - self.prefill_seconds)


def run_engine(engine: str, folder: Path, workloads: Sequence[Workload], options: dict[str, Any]) -> list[Result]:
    """In this process: starts one engine and takes it through the workloads."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = AutoConfig.from_pretrained(folder)
    vocab = config.vocab_size
    begun = time.perf_counter()
    answer = ENGINES[engine](folder, device, options)
    start = time.perf_counter() - begun
    print(f"{PROGRESS}{engine} started in {start:.0f} s", flush=True)
    measured = []
    for workload in workloads:
        requests = workload.requests(vocab)
        answer([(prompt, min(n, 24)) for prompt, n in requests])  # whatever is compiled on first use
        prefill = _timed(answer, [(prompt, 1) for prompt, _ in requests]).seconds
        run = _best(answer, requests)
        _require_sane(run.answers, requests, vocab)
        speed = sum(n for _, n in requests) / run.seconds
        print(f"{PROGRESS}{engine} {workload.name}: {speed:,.0f} tok/s", flush=True)
        measured.append((workload, run, prefill, _gib_in_use(device)))
    module = plain_model(folder, device)
    results = []
    for workload, run, prefill, gib in measured:
        tokens = [tokens for tokens, _ in run.answers]
        result = Result(
            engine=engine,
            workload=workload.name,
            tokens=sum(map(len, tokens)),
            seconds=run.seconds,
            prefill_seconds=prefill,
            limit_seconds=workload.limit_seconds(module.config, weight_bytes(folder), vocab),
            steps=max(map(len, tokens)),
            gib=gib,
            start_seconds=start,
            difference=_difference(run.answers, workload.requests(vocab), module),
            cpu_seconds=run.cpu_seconds,
            begun=run.begun,
        )
        results.append(result)
    return results


@dataclass(frozen=True, slots=True)
class Run:
    begun: float
    seconds: float
    cpu_seconds: float
    answers: list[Answer]


def _timed(answer: Any, requests: Sequence[tuple[list[int], int]]) -> Run:
    begun, cpu_begun = time.monotonic(), time.process_time()
    answers = answer(requests)
    return Run(begun, time.monotonic() - begun, time.process_time() - cpu_begun, answers)


def _best(answer: Any, requests: Sequence[tuple[list[int], int]]) -> Run:
    """Of what is over in a tenth of a second, single runs differ by half on a machine that others use."""
    runs = [_timed(answer, requests)]
    while sum(run.seconds for run in runs) < SHORT or (len(runs) == 1 and runs[0].seconds < LONG):
        runs.append(_timed(answer, requests))
    return min(runs, key=lambda run: run.seconds)


def _difference(answers: list[Answer], requests: Sequence[tuple[list[int], int]], module: Any) -> float | None:
    """Of the first answers' log-probs from those of plain transformers; None if the engine returns none."""
    if not answers[0][1]:
        return None
    pairs = [
        (logp, rescore(module, prompt, tokens))
        for (tokens, logp), (prompt, _) in list(zip(answers, requests, strict=True))[:SCORED]
    ]
    return fmean(abs(x - y) for logp, found in pairs for x, y in zip(logp, found, strict=True))


def _require_sane(answers: Sequence[Answer], requests: Sequence[tuple[list[int], int]], vocab: int) -> None:
    for (tokens, logp), (_, length) in zip(answers, requests, strict=True):
        if len(tokens) != length or not all(0 <= t < vocab for t in tokens) or any(not x <= 0 for x in logp):
            raise RuntimeError(
                f"an answer of {len(tokens)} tokens where {length} were asked for, or not of the vocabulary"
            )
    if len({tuple(tokens[:16]) for tokens, _ in answers}) < len(answers) // 2:
        raise RuntimeError("more than half of the answers begin alike")


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
    """`engines` are names, with options after colons: `vllm:multiprocessing=0`."""
    chosen = [WORKLOADS[name] for name in known("workload", workloads, WORKLOADS)]
    known("shape", [shape], SHAPES)
    for engine in engines:
        _require_runnable(engine)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    context = max(w.context for w in chosen)
    results: list[Result] = []
    with checkpoint(SHAPES[shape], layers, context, device) as folder, sampled(device) as samples:
        torch.cuda.empty_cache()
        for engine in engines:
            with console.status(f"{engine} …"):
                found = _in_process(engine, folder, chosen, threads, console)
                results += [_with_clocks(result, samples) for result in found]
    size = f"{shape}{f', {layers} layers' if layers else ''}{f', {threads} thread(s)' if threads else ''}"
    text = f"{size}, {device_name()}\n\n{table(results)}\n"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    if out:
        with out.open("a") as file:
            file.write(text + "\n")


def _require_runnable(engine: str) -> None:
    name, settings = engine.partition(":")[0], _settings(engine)
    known("engine", [name], ENGINES)
    known(f"option of {name}", [*settings], OPTIONS[name])
    if name == "lockstep":
        rollout_config({"max_seqs": 1, "kv_gib": 1.0} | settings)
    elif "python" in settings:
        if shutil.which(str(settings["python"])) is None:
            raise ConfigError(f"{engine}: there is no interpreter {settings['python']}")
    elif name == "vllm" and not find_spec("vllm"):
        raise ConfigError("vllm is not installed here; vllm:python=PATH names an interpreter that has it")


def known(kind: str, names: Sequence[str], known: Collection[str]) -> Sequence[str]:
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown {kind} {name!r}; choices: {', '.join(known)}")
    return names


def _in_process(
    engine: str, folder: str, workloads: Sequence[Workload], threads: int | None, console: Console
) -> list[Result]:
    python = _settings(engine).get("python", sys.executable)
    command = [python, "-m", "lockstep.cli.bench_rollout", engine, folder, *(w.name for w in workloads)]
    paths = [str(Path(lockstep.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}  # another interpreter finds us too
    if threads is not None:  # vLLM takes them as they are only if it does not bind them itself
        environment |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (
        TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process,
    ):
        killer = Timer(TIMEOUT, process.kill)
        killer.start()
        try:
            lines = [line for line in process.stdout or () if not _passed_on(line, console)]
        except BaseException:
            process.kill()
            raise
        finally:
            killer.cancel()
        process.wait()
        log.seek(0)
        results = [line for line in lines if line.startswith(RESULTS)]
        if process.returncode or not results:
            tail = "".join([*lines, *log.readlines()][-40:])
            raise RuntimeError(f"{engine} failed (exit code {process.returncode}):\n{tail}")
    return [Result(**fields) for fields in json.loads(results[0].removeprefix(RESULTS))]


def _with_clocks(result: Result, samples: Sequence[Sample]) -> Result:
    watts, mhz = means(samples, result.begun, result.begun + result.seconds)
    return replace(result, watts=watts, mhz=mhz)


def _passed_on(line: str, console: Console) -> bool:
    """What an engine's process has to tell while it runs is shown at once."""
    if told := line.startswith(PROGRESS):
        console.print(line.removeprefix(PROGRESS).strip(), markup=False, highlight=False)
    return told


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
    cells += [f"{r.decode_ms:.2f}", *(_on_gpu(r) if on_gpu else [f"{r.tokens_per_cpu_s:,.0f}"])]
    return [*cells, f"{r.start_seconds:.0f}", _shown(r.difference, ".4f")]


def _on_gpu(r: Result) -> list[str]:
    return [f"{r.of_limit:.0%}", f"{r.gib:.0f}", _shown(r.watts, ",.0f"), _shown(r.mhz, ",.0f")]


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
    pairs = (setting.partition("=")[::2] for setting in engine.split(":")[1:])
    return {key: parse_value(value) for key, value in pairs}


def main(engine: str, folder: str, *names: str) -> None:
    workloads = [WORKLOADS[name] for name in names]
    options = _options(engine, Path(folder), workloads)
    results = run_engine(engine.partition(":")[0], Path(folder), workloads, options)
    named = [asdict(result) | {"engine": engine} for result in results]
    print(RESULTS + json.dumps(named), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
