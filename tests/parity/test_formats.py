"""Every kernel of every format against its plain reference, on the shapes and values that break kernels.

Listed from the folder of formats and the table of kernels: a new one is tested by being there.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.quant.encoded import Encoded
from lockstep.quant.format import Format
from lockstep.quant.formats.w4a16 import W4A16
from lockstep.quant.kernels import CANDIDATES, Kernel, choose, cpu, load, reference
from quant_support import all_formats, expert, same_bytes

INTEGER = {"int8_matmul", "w4a8_matmul"}  # exact sums: kernels agree to the last bit
SHAPES = [  # rows, inputs, outputs
    (1, 1, 1),
    (3, 7, 5),
    (0, 64, 8),
    (1, 128, 16),
    (2, 129, 1),
    (17, 300, 33),
    (64, 256, 128),
    (5, 2100, 24),
]

formats = pytest.mark.parametrize("format", all_formats(), ids=str)


def cpu_kernels(operation: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[Kernel]:
    """All candidates that can, not only the first."""
    return [load(name) for name, can in CANDIDATES["cpu"].get(operation, ()) if can(shape, dtype)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_agrees(format: Format, got: Tensor, x: Tensor, weight: Encoded) -> None:
    """With the reference, to the last bit or within its bound."""
    rows = format.encode_input(x)
    expected = getattr(reference, format.operation)(*rows, weight.codes, weight.scales, got.dtype)
    assert got.dtype == expected.dtype
    if format.operation in INTEGER:
        assert torch.equal(got, expected)
    else:
        decoded, weights = format.decode_input(rows, torch.float32), format.dequantize(weight, torch.float32)
        bound = reference.error_bound(decoded, weights, expected)
        assert ((got.double() - expected.double()).abs() <= bound).all()


@formats
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_kernel_is_its_reference(format: Format, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    M, K, N = shape
    x, weight = normal(M, K).to(dtype), format.quantize(normal(N, K, seed=1))
    kernels = cpu_kernels(format.operation, (N, K), dtype)
    assert kernels, f"{format.operation} has no kernel for the CPU"
    for kernel in kernels:
        got = kernel.run(*format.encode_input(x), weight.codes, weight.scales, dtype)
        assert got.shape == (M, N)
        assert_agrees(format, got, x, weight)


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_scale_that_is_off_by_a_fiftieth_would_be_seen(format: Format, dtype: torch.dtype) -> None:
    """In any one channel, though the sums of a row cancel."""
    x, weight = normal(16, 256).to(dtype), format.quantize(normal(32, 256, seed=1))
    scales = weight.scales.clone()
    scales[(-1,) * scales.ndim] *= 1.02
    got = format.matmul(format.encode_input(x), replace(weight, scales=scales), dtype)
    with pytest.raises(AssertionError):
        assert_agrees(format, got, x, weight)


@formats
def test_outliers(format: Format) -> None:
    x, weight = normal(6, 200), normal(40, 200, seed=1)
    x[1] *= 1e4
    x[2, 17] = 3e5
    x[3] *= 1e-30
    weight[4] *= 1e3
    weight[5, 60] = 500.0
    encoded = format.quantize(weight)
    assert_agrees(format, format.linear(x, encoded), x, encoded)


@formats
def test_rows_do_not_touch_each_other(format: Format) -> None:
    """Scales are per token: an outlier, or the size of the batch, changes nobody else's row."""
    x, encoded = normal(9, 160), format.quantize(normal(48, 160, seed=1))
    calm = format.linear(x, encoded)
    x[3] *= 1e5
    stormy = format.linear(x, encoded)
    alone = torch.cat([format.linear(row[None], encoded) for row in x])
    others = torch.arange(9) != 3
    assert torch.equal(calm[others], stormy[others])
    assert_agrees(format, alone, x, encoded)


@pytest.mark.parametrize("format", [f for f in all_formats() if not isinstance(f, W4A16)], ids=str)
def test_a_row_is_the_same_bits_in_any_batch(format: Format) -> None:
    """A last bit that depends on the batch moves codes of the next layer's input; over the layers of a real model that
    comes to as much as not aligning the learner at all."""
    x, encoded = normal(100, 1536), format.quantize(normal(576, 1536, seed=1))
    whole = format.linear(x, encoded)
    for rows in (1, 2, 8, 33):
        assert torch.equal(format.linear(x[:rows], encoded), whole[:rows])


@formats
@pytest.mark.parametrize("size", [0.0, 1e-42], ids=["zero", "subnormal"])
def test_rows_and_channels_of_nothing(format: Format, size: float) -> None:
    x, weight = normal(4, 130), normal(20, 130, seed=1)
    x[2] = size
    weight[7] = size
    encoded = format.quantize(weight)
    y = format.linear(x, encoded)
    assert torch.isfinite(y).all()
    assert y[2].abs().max() <= size * 1e4
    assert y[:, 7].abs().max() <= size * 1e4
    assert format.dequantize(encoded, torch.float32)[7].abs().max() <= max(size, 2.0**-126)


@formats
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_without_codes_are_refused(format: Format, bad: float) -> None:
    weight = normal(2, 6, 140)
    weight[1, 3, 139] = bad
    with pytest.raises(ValueError, match=r"weight \(2, 6, 140\) that holds NaN or inf"):
        format.quantize(weight)


@formats
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_inputs_without_codes_are_refused(format: Format, bad: float) -> None:
    x, encoded = normal(3, 140), format.quantize(normal(8, 140, seed=1))
    x[1, 139] = bad
    if len(format.encode_input(normal(3, 140))) == 1:  # inputs are not encoded: it shows in the output
        assert not torch.isfinite(format.linear(x, encoded)[1]).any()
    else:
        with pytest.raises(ValueError, match="activations that hold NaN or inf"):
            format.linear(x, encoded)


@formats
@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (0, 0, 0, 4), (0, 0, 0, 0)], ids=str)
def test_experts_are_linears_side_by_side(format: Format, counts: tuple[int, ...]) -> None:
    x, encoded = normal(sum(counts), 150), format.quantize(normal(4, 24, 150, seed=1))
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    got = format.grouped(x, offsets, encoded)
    rows = x.split(list(counts))
    expected = torch.cat([format.linear(part, expert(encoded, e)) for e, part in enumerate(rows)])
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@formats
def test_an_expert_is_quantized_as_if_alone(format: Format) -> None:
    weight = normal(3, 140, 260)
    whole = format.quantize(weight)
    for e in range(3):
        assert same_bytes(expert(whole, e), format.quantize(weight[e]))


@formats
def test_leading_dimensions_and_bias(format: Format) -> None:
    x, bias = normal(2, 5, 96), normal(12, seed=2)
    encoded = format.quantize(normal(12, 96, seed=1))
    expected = torch.stack([format.linear(part, encoded) + bias for part in x])
    torch.testing.assert_close(format.linear(x, encoded, bias), expected, rtol=1e-5, atol=1e-5)


@formats
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 5), inputs=st.integers(1, 270), log_size=st.floats(-3, 3))
def test_dequantized_weights_are_half_a_code_away(
    format: Format, seed: int, rows: int, inputs: int, log_size: float
) -> None:
    weight = normal(rows, inputs, seed=seed) * 10**log_size
    encoded = format.quantize(weight)
    error = (format.dequantize(encoded, torch.float32) - weight).abs()
    if encoded.codes.is_floating_point():  # e4m3: 3 bits of mantissa, and 2**-10 of a scale below the smallest exponent
        scale = max(float(weight.abs().amax()) / 448, reference.FP8_MIN_SCALE)
        assert (error <= weight.abs() / 16 * 1.001 + scale * 2.0**-10).all()
    else:
        levels = 2 ** (format.bits - 1) - 1
        step = (weight.abs().amax(-1, keepdim=True) / levels).clamp_min(reference.INT4_MIN_SCALE)
        assert (error <= 0.502 * step).all()  # a 4-bit scale is rounded to bfloat16, by up to 2**-8


def test_sums_of_int8_codes_are_exact() -> None:
    """Also at the largest sum there is, and where one float32 product would round."""
    generator = torch.Generator().manual_seed(0)
    for K in (1, 1024, 1025, 5000):
        x = torch.randint(-127, 128, (4, K), dtype=torch.int8, generator=generator)
        w = torch.randint(-127, 128, (6, K), dtype=torch.int8, generator=generator)
        x[0], w[0], w[1] = 127, 127, -127
        expected = x.long() @ w.long().T
        assert torch.equal(cpu.accumulate_float(x, w).long(), expected)
        if K > 1 and cpu.has_int8_dot():
            assert torch.equal(torch._int_mm(x, w.T).long(), expected)


def test_the_table_names_real_kernels() -> None:
    for operation in CANDIDATES["cpu"]:
        assert choose(operation, "cpu", (16, 16), torch.float32).name.startswith("cpu.")
    assert choose("int8_matmul", "meta", (16, 16), torch.float32).name == "reference.int8_matmul"
