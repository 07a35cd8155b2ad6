"""`lockstep bench mismatch`, made as small as it gets: one format, one step, its tables and the page they go into."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.cli import bench_mismatch as bench
from lockstep.cli.bench_mismatch import Gap, Row, Sync, gap_table, sync_table
from lockstep.cli.benchmarks import marks, require_page, write_into
from lockstep.config import ConfigError, choices

compare = partial(
    bench.compare, device="cpu", steps=1, float32_logits=False, out=None, json_out=None, console=Console()
)


def test_a_4_bit_learner_that_is_aligned_is_far_closer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "precisions", lambda: ["w4a8"])
    monkeypatch.setattr(bench, "MODELS", {"mixture": {"experts": 2}})
    monkeypatch.setattr(bench, "SMALL", {"hidden": 32, "layers": 1, "heads": 2, "context": 128})
    monkeypatch.setattr(bench, "LARGE", {"hidden": 128, "layers": 1, "heads": 2, "context": 32})
    monkeypatch.setattr(bench, "SYNCS", 2)
    console = Console(record=True, width=200)
    page, kept = tmp_path / "page.md", tmp_path / "kept.json"
    compare((), warmup=3, out=page, json_out=kept, console=console)
    result = json.loads(kept.read_text())
    high, eight, low = result["gaps"]
    assert (high["precision"], high["aligned"]) == ("high", None), "a learner in high precision is not an aligned one"
    assert (eight["precision"], eight["aligned"]) == (bench.KEYS_AND_VALUES, None)
    assert high["unaligned"]["k3"] < eight["unaligned"]["k3"] < 0.1
    assert (low["precision"], low["model"]) == ("w4a8", "mixture")
    assert low["aligned"]["k3"] < 0.1 * low["unaligned"]["k3"]
    published = {sync["precision"]: sync["mib"] for sync in result["syncs"]}
    assert published["w4a8"] < 0.4 * published["high"]
    assert "| mixture | `w4a8` |" in page.read_text()
    assert "mixture: warming up" in console.export_text()


def test_long_answers_are_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "precisions", lambda: ["w4a8"])
    monkeypatch.setattr(bench, "LONG", {"hidden": 32, "layers": 1, "heads": 2, "context": 128, "experts": 0})
    monkeypatch.setattr(bench, "LONG_ANSWER", 60)
    console = Console(record=True, width=200)
    compare(["long"], warmup=1, console=console)
    assert "| long | `w4a8` |" in console.export_text()


def test_what_exactness_is_to_be_had_for() -> None:
    exact = {bench.in_words(precision) for precision in bench.precisions() if bench._batch_invariant(precision)}
    assert exact == {"int8_w8a8", "w4a8", "fp8_w8a8 block=True", "w4a8 inputs=fp8"}


def test_what_is_named_twice_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(bench.Bench, "gaps", lambda self: asked.append(self.models) or [])
    monkeypatch.setattr(bench, "_syncs", lambda models, console: [])
    compare(["dense", "dense"], warmup=1)
    assert asked == [("dense",)]


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown model 'sparse'; choices: dense, mixture, long"):
        compare(["sparse"], warmup=1)


def test_every_format_is_measured() -> None:
    assert {bench.in_words(precision).split()[0] for precision in bench.precisions()} == set(
        choices("lockstep.quant.formats")
    )
    assert "fp8_w8a8 block=True" in map(bench.in_words, bench.precisions())


def test_tables() -> None:
    rows = [
        Row("dense", "high", Gap(1e-14, 0.0, 1.0)),
        Row("dense", "w4a16", Gap(1e-2, 0.05, 9.0), Gap(1e-6, 0, 1)),
    ]
    high, low = gap_table(rows).splitlines()[2:]
    assert high == "| dense | `high` | 1.0e-14 | 0.00% | 1 | – | – | – | – |"
    assert low == "| dense | `w4a16` | 1.0e-02 | 5.00% | 9 | 1.0e-06 | 0.00% | 1 | 1e+04 |"
    rows.append(Row("dense", "w4a8", Gap(1e-2, 0.05, 9.0), Gap(1e-6, 0, 1), Gap(1e-13, 0, 1)))
    header, _, high, _, exact = gap_table(rows).splitlines()
    assert header.endswith("| exact: k3 | max w |")
    assert high.endswith("| – | – | – |")
    assert exact.endswith("| 1e+04 | 1.0e-13 | 1 |")
    syncs = [Sync("dense", "high", 40.0, 0.0, 30.0, 0.2), Sync("dense", "w4a16", 10.0, 50.0, 8.0, 0.2)]
    assert sync_table(syncs).splitlines()[-1] == "| dense | `w4a16` | 10.0 | 25% | 50.0 | 8.0 | 0.2 |"


def test_a_page_keeps_what_stands_around_its_tables(tmp_path: Path) -> None:
    page, (begin, end), (other, ends) = tmp_path / "page.md", marks("measured"), marks("cost")
    write_into(page, "one")
    assert page.read_text() == f"{begin}\none\n{end}\n"
    page.write_text(f"# Title\n{begin}\nold\n{end}\nbetween\n{other}\nold\n{ends}\n")
    write_into(page, "two")
    write_into(page, "three", "cost")
    assert page.read_text() == f"# Title\n{begin}\ntwo\n{end}\nbetween\n{other}\nthree\n{ends}\n"
    page.write_text("precious\n")
    write_into(page, "one")
    assert page.read_text() == f"precious\n\n{begin}\none\n{end}\n"
    page.write_text(f"{begin}\nprecious\n")
    with pytest.raises(ConfigError, match="without"):
        write_into(page, "one")
    with pytest.raises(ConfigError, match="without"):
        require_page(page)
    assert page.read_text() == f"{begin}\nprecious\n"
    page.write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"page\.md is not a text in UTF-8"):
        require_page(page)
