"""`lockstep bench routing` and `routing-cost`, made as small as they get."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.cli import bench_routing as bench
from lockstep.cli import bench_routing_cost as cost
from lockstep.cli.benchmarks import marks
from lockstep.config import ConfigError

SHAPE = {"hidden": 32, "layers": 2, "heads": 4, "context": 128, "experts": 4}


def test_the_same_tokens_with_and_without_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "precisions", lambda: ["int8_w8a8"])
    monkeypatch.setattr(bench, "MIXTURE", SHAPE)
    monkeypatch.setattr(bench, "STD", 0.2)
    page, kept = tmp_path / "page.md", tmp_path / "kept.json"
    bench.compare(samples=4, warmup=2, out=page, json_out=kept, console=Console(record=True))
    rows = json.loads(kept.read_text())["rows"]
    assert [(row["model"], row["precision"]) for row in rows] == [
        (model, precision) for model in ("random", "warmed up") for precision in ("high", "int8_w8a8")
    ]
    random = rows[1]
    assert random["apart"]["differ"] > 0
    assert random["apart"]["k3_replayed"] < random["apart"]["k3"] / 2
    assert random["aligned"]["k3"] < 1e-6
    assert rows[0]["apart"]["k3"] < 1e-6
    begin, _ = marks("gap")
    assert page.read_text().startswith(begin)
    assert "| random | `int8_w8a8` | aligned |" in page.read_text()


def test_costs_are_measured_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "LONG", (16, 2, 8))
    console, page = Console(record=True, width=200), tmp_path / "page.md"
    size = cost.Size(seqs=3, prompt_tokens=5, max_tokens=6)
    cost.compare("tiny", 2, size, pairs=2, device="cpu", out=page, console=console)
    text = console.export_text()
    assert "tiny with 2 layers, 3 answers of 5 + 6 tokens at a time" in text
    assert "Routes take 4 bytes per token, keys and values 2,048: 0.20%" in text
    assert "| recording, per turn of the engine |" in text
    assert "| replay, per learner step |" in page.read_text()
    with pytest.raises(ConfigError, match="unknown shape 'huge'; choices: tiny, 30b-a3b"):
        cost.compare("huge", 2, size, pairs=2, device="cpu", out=None, console=console)


def test_answers_must_fit_the_context_of_their_shape() -> None:
    """Before anything is made."""
    size = cost.Size(seqs=1, prompt_tokens=64, max_tokens=10**9)
    complaint = "--prompt-tokens 64 and --max-tokens 1000000000 make 1,000,000,064 tokens, which must be at most 4,096"
    with pytest.raises(ConfigError, match=complaint):
        cost.compare("tiny", 2, size, pairs=1, device="cpu", out=None, console=Console())


def test_a_median_is_trusted_as_far_as_there_are_values() -> None:
    assert cost.median_interval([3.0]) == (3.0, 3.0)
    assert cost.median_interval([1.0, 9.0, 5.0]) == (1.0, 9.0)
    low, high = cost.median_interval([float(i) for i in range(100)])
    assert (low, high) == (40.0, 59.0)
