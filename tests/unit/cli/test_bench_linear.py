"""`lockstep bench linear`: what can be known without a GPU."""

from __future__ import annotations

import pytest
import torch

from lockstep.cli import bench_aligned, bench_block
from lockstep.cli import bench_linear as bench
from lockstep.cli.bench import bench_linear
from lockstep.config import ConfigError
from lockstep.quant.format import Format


def test_it_refuses_to_run_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for learner in (False, True):
        with pytest.raises(ConfigError, match="no CUDA device"):
            bench_linear(rows=[16], learner=learner)


def test_the_table_compares_with_bf16_at_the_same_rows() -> None:
    results = [
        bench.Measured("bf16", 16, 100e-6, 100e-6, 50e-6),
        bench.Measured("w4a16", 16, 40e-6, 40e-6, 20e-6),
        bench.Measured("bf16", 64, 120e-6, 120e-6, 50e-6),
        bench.Measured("w4a16", 64, 60e-6, 60e-6, 20e-6),
    ]
    lines = bench.table(results).splitlines()
    assert lines[3] == "| 16 | w4a16 | 40.0 | 40.0 | 20.0 | 50% | 2.50 |"
    assert lines[5].endswith("| 2.00 |")


def test_rotated_weights_exceed_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ROTATED_BYTES", 5000)
    weights: bench.Weights = [(torch.zeros(1000, dtype=torch.uint8), torch.zeros(10))]
    copies = bench.rotated(weights, used=0.5)
    assert bench.num_bytes(weights) == 1040
    assert len(copies) * 1040 * 0.5 >= 5000
    assert len({layer[0].data_ptr() for copy in copies for layer in copy}) == len(copies)


def test_experts_rows_are_counted_by_expert() -> None:
    problem = bench.experts(32, torch.device("cpu"))
    assert problem.offsets is not None
    assert problem.offsets[-1] == 32 * bench.TOP_K
    assert (problem.offsets.diff() >= 0).all()
    assert all(len(x) == 32 * bench.TOP_K for x in problem.inputs.values())


def test_a_learner_s_step_is_compared_with_and_without_quantizing() -> None:
    step = bench_aligned.Step("w4a16", 4096, forward_backward=6e-3, quantize=1e-3, in_bf16=5e-3)
    assert bench_aligned.table([step]).splitlines()[2] == "| 4096 | w4a16 | 5.00 | 6.00 | 1.20 | 1.00 | 1.40 |"


def test_a_block_is_compared_with_bf16_with_and_without_encoding_kernels() -> None:
    results = [
        bench_block.Measured("bf16", 16, 120e-6, 121e-6),
        bench_block.Measured("int8_w8a8", 16, 60e-6, 80e-6),
    ]
    assert bench_block.table(results).splitlines()[3] == "| 16 | int8_w8a8 | 60.0 | 2.00 | 80.0 | 1.50 |"


@pytest.mark.parametrize("format", [None, *bench.formats().values()], ids=str)
def test_a_block_has_the_layers_of_the_bench(format: Format | None, monkeypatch: pytest.MonkeyPatch) -> None:
    small = [("qkv", 48, 32), ("o", 32, 32), ("gate_up", 128, 32), ("down", 32, 64)]
    monkeypatch.setattr(bench_block, "FUSED_BLOCK", small)
    matrices = [torch.randn(N, K) for _, N, K in small]
    weights = [(m,) if format is None else tuple(format.quantize(m).tensors.values()) for m in matrices]
    for layer, matrix in zip(bench_block.linears(format, weights), matrices, strict=True):
        x = torch.randn(3, matrix.shape[1])
        assert (layer(x) - x @ matrix.mT).norm() < 0.2 * (x @ matrix.mT).norm()


def test_a_page_keeps_its_prose_and_gets_fresh_tables() -> None:
    page = "# P\n\n### A\n\nWhy.\n\n| old |\n|---|\n| 1 |\n\nAfter.\n"
    fresh = bench.with_tables(page, {"A": "| new |\n|---|\n| 2 |", "B": "| b |"})
    assert fresh == "# P\n\n### A\n\nWhy.\n\n| new |\n|---|\n| 2 |\n\nAfter.\n\n### B\n\n| b |\n"
    assert bench.with_tables(fresh, {"B": "| b |"}) == fresh
