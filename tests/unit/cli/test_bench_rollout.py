from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from lockstep.cli import bench_rollout
from lockstep.cli.bench import bench
from lockstep.cli.bench_rollout import Result, _options, compare, run_engine, table
from lockstep.cli.gpu_clocks import Sample
from lockstep.cli.rollout_engines import ENGINES, OPTIONS, continuous_batching, plain_model
from lockstep.cli.rollout_processes import EngineError
from lockstep.cli.rollout_workloads import SHAPES, WORKLOADS, checkpoint
from lockstep.config import ConfigError


@pytest.mark.parametrize(
    ("shape", "workload", "engine", "message"),
    [
        ("7b", "8x4x16+32", "lockstep", "unknown shape '7b'; choices: tiny, "),
        ("tiny", "big", "lockstep", "unknown workload 'big'; choices: "),
        ("tiny", "8x4x16+32", "sglang", "unknown engine 'sglang'; choices: lockstep, vllm"),
        ("tiny", "8x4x16+32", "vllm", "vllm is not installed here; vllm:python=PATH names"),
        ("tiny", "8x4x16+32", "lockstep:precison=w4a16", "unknown option of lockstep 'precison'; choices: precision"),
        ("tiny", "8x4x16+32", "lockstep:precision=w4", "lockstep: precision: unknown format 'w4'"),
        ("tiny", "8x4x16+32", "lockstep:step_tokens=1x", "lockstep: step_tokens: .*1x"),
        ("tiny", "8x4x16+32", "vllm:python=/gone", "there is no interpreter /gone"),
        ("tiny", "8x4x16+32", f"vllm:python={sys.executable}", "vllm is not installed for "),
        ("tiny", "8x4x16+32", "vllm:multiprocessing=maybe", "multiprocessing=maybe is neither true nor false"),
        ("tiny", "8x4x16+32", "lockstep:record=no", "record=no is neither true nor false"),
        ("tiny", "8x4x16+32", "lockstep:kv=fp8:kv=high", "lockstep:kv=fp8:kv=high: kv is given twice"),
        ("tiny", "8x4x16+32", "generate:x=1", "unknown option of generate 'x'; choices: none"),
        (
            "tiny",
            "8x4x16+32",
            "lockstep:kv_gib=0.00001",
            "lockstep:kv_gib=0.00001: .* does not hold the keys",
        ),
        ("tiny", "8x4x16+32", "vllm:kv=fp8", "vllm is not installed here; vllm:python=PATH names"),
        ("tiny", "8x4x16+32", "vllm:vk=fp8", "unknown option of vllm 'vk'; choices: .*kv"),
    ],
)
def test_what_is_unknown_is_refused(shape: str, workload: str, engine: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("+", r"\+")):
        compare(shape, None, [workload], [engine], None, Console())


def test_every_engine_is_asked_the_same() -> None:
    workload = WORKLOADS["64x8x512+2048"]
    requests = workload.requests(1000)
    assert requests == workload.requests(1000)
    assert len(requests) == 64 * 8
    assert requests[0][0] == requests[7][0] != requests[8][0], "answers of a group share their prompt"
    assert 16 <= min(n for _, n in requests) < max(n for _, n in requests) <= 2048


def test_the_limit_counts_weights_and_live_keys_and_values() -> None:
    workload, config = WORKLOADS["256x128+256"], SHAPES["0.6b"].config(512)
    token_bytes = 2 * 2 * 28 * 8 * 128
    read = sum(1_000_000 + 256 * token_bytes * (128 + step) for step in range(1, 257))
    assert workload.limit_seconds(config, 1_000_000, 1000) == pytest.approx(read / 4.24e12)


def test_the_limit_counts_a_prompt_once_while_any_of_its_answers_lives() -> None:
    workload, config = WORKLOADS["8x4x16+32"], SHAPES["tiny"].config(64)
    token_bytes, lengths = 2 * 2 * 2 * 2 * 32, [n for _, n in workload.requests(512)]
    tokens = 0
    for step in range(1, max(lengths) + 1):
        tokens += sum(step for n in lengths if n >= step)
        tokens += sum(16 for first in range(0, 32, 4) if max(lengths[first : first + 4]) >= step)
    assert workload.limit_seconds(config, 0, 512) == pytest.approx(tokens * token_bytes / 4.24e12)


def test_a_table_compares_with_vllm() -> None:
    def result(engine: str, seconds: float) -> Result:
        return Result(engine, "w", 1000, seconds, 0.5, 0.25, 11, 1.0, 2.0, None)

    lines = table([result("lockstep", 1.0), result("vllm:multiprocessing=0", 2.5)]).splitlines()
    assert [cell.strip() for cell in lines[2].split("|")[3:5]] == ["1,000", "2.50"]
    assert "| 50.00 | 50% |" in lines[2]
    assert "| 0.50 | 0.50 | – | – |" in table([result("continuous", 0.5)]), "nothing is left for the answers"


def test_a_comparison_shows_power_and_clock_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def result(engine: str, *asked: Any) -> Result:
        begun = {"lockstep": 10.0, "generate": 20.0}[engine]
        return Result(engine, "w", 1000, 1.0, 0.5, 0.25, 11, 1.0, 2.0, None, 1.0, begun)

    samples = [Sample(9.9, 100.0, 1980.0), Sample(10.1, 680.0, 1500.0), Sample(10.9, 690.0, 1401.0)]
    monkeypatch.setattr(bench_rollout, "sampled", lambda device: nullcontext(samples))
    monkeypatch.setattr(bench_rollout, "_in_process", lambda *asked: (result(*one) for one in [asked]))
    compare("tiny", None, ["8x4x16+32"], ["lockstep", "generate"], tmp_path / "table.md", Console(quiet=True))
    head, _, first, second = (tmp_path / "table.md").read_text().splitlines()[2:6]
    assert "| of the limit | GiB | W | MHz | start s |" in head
    assert "| 50% | 1 | 685 | 1,450 | 2 |" in first
    assert "| 50% | 1 | – | – | 2 |" in second


def test_what_was_measured_outlives_an_engine_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(engine: str, *asked: Any) -> Iterator[Result]:
        yield Result(engine, "w", 1000, 1.0, 0.5, 0.25, 11, 0.0, 2.0, None, 1.0)
        if engine == "generate":
            raise EngineError("generate failed")

    monkeypatch.setattr(bench_rollout, "_in_process", measured)
    with pytest.raises(SystemExit, match="1"):
        compare("tiny", None, ["8x4x16+32"], ["lockstep", "generate"], tmp_path / "table.md", Console(quiet=True))
    assert [line.split("|")[2].strip() for line in (tmp_path / "table.md").read_text().splitlines()[4:6]] == [
        "lockstep",
        "generate",
    ]


def test_no_shape_has_more_layers_than_it_has() -> None:
    with pytest.raises(ConfigError, match="3 layers: tiny has 2"):
        SHAPES["tiny"].cut(3)


def test_a_table_of_a_cpu_says_nothing_of_a_gpu() -> None:
    head = table([Result("generate", "w", 1000, 1.0, 0.5, 0.25, 11, 0.0, 2.0, None, 1.0)]).splitlines()[0]
    assert "| ms/step | tok/CPU s | start s |" in head


def test_the_help_names_every_engine_and_option() -> None:
    shown = " ".join(CliRunner().invoke(bench, ["rollout", "--help"], env={"COLUMNS": "120"}).output.split())
    assert f"{', '.join(ENGINES)}; options after colons" in shown
    listed = [f"of {engine}: {', '.join(options)}" for engine, options in OPTIONS.items() if options]
    assert f"Options {'; '.join(listed)}." in shown


@pytest.mark.parametrize(("options", "dtype"), [({}, "auto"), ({"kv": "fp8"}, "fp8")])
def test_vllm_keeps_keys_and_values_as_told(
    options: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=asked.update))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    ENGINES["vllm"](Path("model"), torch.device("cuda"), {"context": 64, "max_seqs": 4, "kv_gib": 1.0} | options)
    assert asked["kv_cache_dtype"] == dtype


def test_a_real_run() -> None:
    """The embedded engine on a tiny model: sane answers, and the log-probs of plain transformers."""
    workload = WORKLOADS["8x4x16+32"]
    before = time.monotonic()
    with checkpoint(SHAPES["tiny"], None, workload.context, torch.device("cpu")) as folder:
        options = _options("lockstep", Path(folder), [workload])
        measured, found = run_engine("lockstep", Path(folder), [workload], options)
    assert measured == replace(found, difference=None), "what is measured comes before it is checked"
    assert found.tokens == sum(n for _, n in workload.requests(512))
    assert found.difference is not None
    assert found.difference < 1e-4
    assert before < found.begun < found.begun + found.seconds < time.monotonic()


@pytest.mark.slow  # it makes a cache of all the memory there is
def test_continuous_batching_answers_as_asked() -> None:
    """Again and again, with other lengths."""
    with checkpoint(SHAPES["tiny"], 1, 64, torch.device("cpu")) as folder:
        answer = continuous_batching(Path(folder), torch.device("cpu"), {})
        for lengths in ([3, 9], [1, 1]):
            answers = answer([([5, 6, 7], length) for length in lengths])
            assert [len(tokens) for tokens, _ in answers] == lengths


def test_bars_of_libraries_are_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with checkpoint(SHAPES["tiny"], 1, 64, torch.device("cpu")) as folder:
        plain_model(Path(folder), torch.device("cpu"))
    assert capfd.readouterr().err == ""
