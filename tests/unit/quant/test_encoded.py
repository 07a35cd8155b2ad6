"""Encoded weights: packing, and what is copied, counted and compared."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.quant.encoded import stack
from lockstep.quant.format import Format
from lockstep.quant.formats.fp8_w8a8 import FP8W8A8
from lockstep.quant.formats.w4a16 import W4A16
from lockstep.quant.kernels import cpu, cuda, reference
from quant_support import all_formats, same_bytes

formats = pytest.mark.parametrize("format", all_formats(), ids=str)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), K=st.integers(1, 400), lead=st.sampled_from([(1,), (3,), (2, 3)]))
def test_packed_codes_come_back(seed: int, K: int, lead: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-7, 8, (*lead, K), dtype=torch.int8, generator=generator)
    packed = reference.pack_int4(codes)
    assert packed.dtype == torch.uint8
    assert packed.shape == (*lead, (K + 1) // 2)
    assert torch.equal(reference.unpack_int4(packed, K), codes)
    assert torch.equal(cpu.unpack_int4(packed, K), codes)


def test_the_fast_conversion_of_fp8_is_exact() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = every[~every.float().isnan()]
    assert len(finite) == 254
    assert torch.equal(cpu.to_float(finite), finite.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", [cpu, cuda])
@pytest.mark.parametrize("K", [256, 131])
def test_decoding_is_exact(kernels: ModuleType, K: int, dtype: torch.dtype) -> None:
    """Also through the operators that run on CUDA, which any device understands."""
    weight = torch.randn(2, 140, K)
    encoded = {
        "dequantize_rows": reference.quantize_rows_int8(weight),
        "dequantize_groups": reference.quantize_groups_fp8(weight),
        "dequantize_blocks": reference.quantize_blocks_fp8(weight),
    }
    codes, scales = reference.quantize_groups_int4(weight)
    cases = [(name, (*tensors, dtype)) for name, tensors in encoded.items()]
    cases += [("dequantize_rows", (*reference.quantize_rows_fp8(weight), dtype))]
    cases += [("dequantize_int4", (reference.pack_int4(codes), scales, K, dtype))]
    for name, arguments in cases:
        if hasattr(kernels, name):
            assert torch.equal(getattr(kernels, name)(*arguments), getattr(reference, name)(*arguments)), name


@formats
@pytest.mark.parametrize("inputs", [256, 131])
def test_changed_counts_codes(format: Format, inputs: int) -> None:
    """Three codes of one output channel, moved by far more than a rounding."""
    weight = torch.full((1, 4, inputs), 0.5)
    weight[..., 0] = 1.0  # the largest of its group: scales stay
    weight[..., 128] = 1.0
    before = format.quantize(weight)
    weight[0, 2, [5, 40, 100]] = -0.5
    after = format.quantize(weight)
    assert float(before.changed(after)) == pytest.approx(3 / (4 * inputs))
    assert float(before.changed(before)) == 0.0
    assert not same_bytes(before, after)


@formats
def test_copy_in_place_is_byte_for_byte(format: Format) -> None:
    old, new = format.quantize(torch.randn(2, 8, 130)), format.quantize(torch.randn(2, 8, 130))
    shared = old.codes
    old.copy_(new)
    assert same_bytes(old, new)
    assert shared.data_ptr() == old.codes.data_ptr() != new.codes.data_ptr()
    with pytest.raises(ValueError, match="does not fit"):
        old.copy_(format.quantize(torch.randn(8, 130)))


@formats
def test_bytes_of_a_large_weight(format: Format) -> None:
    encoded = format.quantize(torch.randn(256, 1024))
    bits = 8 * encoded.num_bytes / (256 * 1024)
    assert format.bits <= bits <= format.bits * 1.07
    assert encoded.scales.dtype == torch.float32


@formats
def test_quantizing_takes_masters_of_any_precision(format: Format) -> None:
    weight = torch.randn(8, 140).bfloat16()
    assert same_bytes(format.quantize(weight), format.quantize(weight.float()))


@formats
def test_stacked_weights_give_the_products_of_their_parts(format: Format) -> None:
    x, sizes = torch.randn(3, 140), (128, 256, 70)
    weights = [format.quantize(torch.randn(size, 140)) for size in sizes]
    expected = torch.cat([format.linear(x, weight) for weight in weights], -1)
    whole, parts = stack(weights)
    assert torch.equal(format.linear(x, whole), expected)
    assert all(same_bytes(part, weight) for part, weight in zip(parts, weights, strict=True))
    parts[1].copy_(weights[1])
    parts[0].copy_(other := format.quantize(torch.randn(128, 140)))
    assert torch.equal(format.linear(x, whole)[:, :128], format.linear(x, other))


def test_half_a_block_cannot_be_stacked_on() -> None:
    format = FP8W8A8(block=True)
    with pytest.raises(ValueError, match=r"\(70, 140\), \(128, 140\)\]: a block of rows is not full"):
        stack([format.quantize(torch.randn(70, 140)), format.quantize(torch.randn(128, 140))])


def test_scales_of_4_bit_weights_lie_group_by_group_also_when_stacked() -> None:
    parts = [W4A16().quantize(torch.randn(rows, 300)) for rows in (8, 24)]
    whole, views = stack(parts)
    assert [tensor.scales.stride() for tensor in (*parts, whole)] == [(1, 8), (1, 24), (1, 32)]
    views[1].copy_(parts[1])
    assert torch.equal(whole.scales[8:], parts[1].scales)


def test_scales_of_4_bit_weights_are_bfloat16_values() -> None:
    weight = torch.randn(16, 300)
    scales = W4A16().quantize(weight).scales
    assert scales.dtype == torch.float32
    assert torch.equal(scales, scales.bfloat16().float())
    assert torch.equal(scales, (reference.group_absmax(weight) / 7).bfloat16().float())
