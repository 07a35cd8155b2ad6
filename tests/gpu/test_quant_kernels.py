"""On a GPU: every Triton kernel against the reference, and rows and outputs that do not feel each other."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from lockstep.quant.kernels import load, reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

QUANTIZERS = ("quantize_rows_int8", "quantize_rows_fp8", "quantize_groups_fp8")
# Largest ‖fast − reference‖ / ‖reference‖ in float32. Hopper's tensor cores add e4m3 products with about 14 bits.
PRODUCTS = {
    "int8_matmul": 0.0,
    "fp8_matmul": 5e-4,
    "fp8_block_matmul": 5e-4,
    "w4a16_matmul": 1e-5,
    "w4a8_matmul": 1e-6,
    "w4a8_fp8_matmul": 5e-4,
}
# w4a16 cuts K into parts that depend on the number of rows above 64.
ROW_BY_ROW = ("int8_matmul", "fp8_matmul", "fp8_block_matmul", "w4a8_matmul", "w4a8_fp8_matmul")


def fast(operation: str) -> Callable[..., Tensor]:
    return load(f"triton_{'four' if 'w4' in operation else 'eight'}.{operation}").run


def rows_of(operation: str, M: int, K: int) -> tuple[Tensor, ...]:
    x = torch.randn(M, K, device="cuda")
    x[:, 0] *= 30  # an outlier
    if operation == "w4a16_matmul":
        return (x.bfloat16(),)
    if operation == "fp8_block_matmul":
        return reference.quantize_groups_fp8(x)
    return reference.quantize_rows_fp8(x) if "fp8" in operation else reference.quantize_rows_int8(x)


def weight_of(operation: str, *shape: int) -> tuple[Tensor, Tensor]:
    weight = torch.randn(shape, device="cuda") * 0.02
    if operation.startswith("w4"):
        return reference.quantize_int4(weight)
    quantizer = {"int8": "quantize_rows_int8", "fp8": "quantize_rows_fp8", "fp8_block": "quantize_blocks_fp8"}
    return getattr(reference, quantizer[operation.removesuffix("_matmul")])(weight)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize(("M", "K"), [(1, 4096), (65, 300), (3, 12288), (0, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantizers_equal_the_reference(quantizer: str, M: int, K: int, dtype: torch.dtype) -> None:
    x = (torch.randn(M, K, device="cuda") * torch.rand(M, 1, device="cuda").exp()).to(dtype)
    x[1:2] = 0
    codes, scales = load(f"triton_rows.{quantizer}").run(x)
    expected_codes, expected_scales = getattr(reference, quantizer)(x)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_any_magnitude_equal_the_reference(quantizer: str, dtype: torch.dtype) -> None:
    """Down to the smallest floats and to -0: codes are made without a division for each value."""
    magnitude = torch.exp2(torch.randint(-150, 90, (500, 1), device="cuda").float())
    x = (torch.randn(500, 1000, device="cuda") * magnitude).to(dtype)
    codes, scales = load(f"triton_rows.{quantizer}").run(x)
    expected_codes, expected_scales = getattr(reference, quantizer)(x)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_nan_reaches_the_scale_of_its_row_alone(quantizer: str) -> None:
    x = torch.randn(3, 128, device="cuda")
    x[1, 5] = torch.nan
    scales = load(f"triton_rows.{quantizer}").run(x)[1].flatten()
    assert scales.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("operation", PRODUCTS)
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [
        *[(16, 4096, 4096), (40, 1000, 4096), (96, 512, 2048), (300, 512, 2048), (7, 70, 1100), (0, 64, 128)],
        *[(1100, 384, 4096), (700, 1000, 1152), (513, 70, 12288), (600, 130, 1104)],
    ],
)
def test_products_equal_the_reference(operation: str, M: int, N: int, K: int) -> None:
    x, weight = rows_of(operation, M, K), weight_of(operation, N, K)
    result = fast(operation)(*x, *weight, torch.float32)
    expected = getattr(reference, operation)(*x, *weight, torch.float32)
    assert result.shape == expected.shape
    if M and PRODUCTS[operation] == 0:
        assert torch.equal(result, expected)
    elif M:
        assert distance(result, expected) <= PRODUCTS[operation]


@pytest.mark.parametrize("operation", ["fp8_matmul", "w4a16_matmul"])
def test_many_rows_equal_the_reference_in_the_library_too(operation: str) -> None:
    from lockstep.quant.kernels.triton_configs import LIBRARY_ABOVE  # imports triton, which a CPU may lack

    rows = LIBRARY_ABOVE[operation.removesuffix("_matmul")] + 1
    x, weight = rows_of(operation, rows, 2048), weight_of(operation, 512, 2048)
    result = fast(operation)(*x, *weight, torch.bfloat16)
    assert distance(result, getattr(reference, operation)(*x, *weight, torch.float32)) < 3e-3


@pytest.mark.parametrize("quantizer", ["quantize_blocks_fp8", "quantize_int4"])
@pytest.mark.parametrize("shape", [(512, 2048), (3, 70, 300), (5, 97), (2, 130, 129)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantized_weights_equal_the_reference(quantizer: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = torch.randn(shape, device="cuda").to(dtype)
    weight.view(-1, shape[-1])[1] = 0
    codes, scales = load(f"triton_weights.{quantizer}").run(weight)
    expected_codes, expected_scales = getattr(reference, quantizer)(weight)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(512, 2048), (3, 140, 300), (5, 97), (0, 64)], ids=str)
def test_decoded_codes_equal_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, device="cuda")
    cases = [
        ("dequantize_rows", reference.quantize_rows_int8(x)),
        ("dequantize_rows", reference.quantize_rows_fp8(x)),
        ("dequantize_groups", reference.quantize_groups_fp8(x)),
        ("dequantize_blocks", reference.quantize_blocks_fp8(x)),
    ]
    for name, encoded in cases[: 3 if shape[0] == 0 else 4]:
        decoded = load(f"triton_weights.{name}").run(*encoded, dtype)
        assert torch.equal(decoded, getattr(reference, name)(*encoded, dtype)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(512, 2048), (3, 70, 300), (5, 97)])
def test_decoded_int4_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    packed, scales = weight_of("w4a16_matmul", *shape)
    decoded = load("triton_weights.dequantize_int4").run(packed, scales, shape[-1], dtype)
    assert torch.equal(decoded, reference.dequantize_int4(packed, scales, shape[-1], dtype))


@pytest.mark.parametrize("operation", PRODUCTS)
def test_experts_equal_the_reference(operation: str) -> None:
    counts = [3, 0, 40, 1, 0, 17]
    x, weight = rows_of(operation, sum(counts), 384), weight_of(operation, len(counts), 200, 384)
    bounds = torch.tensor([0, *counts]).cumsum(0)
    result = fast(f"grouped_{operation}")(*x, bounds.to("cuda", torch.int32), *weight, torch.float32)
    parts = [
        getattr(reference, operation)(*(t[a:b] for t in x), *(t[e] for t in weight), torch.float32)
        for e, (a, b) in enumerate(pairwise(bounds.tolist()))
    ]
    assert distance(result, torch.cat(parts)) <= PRODUCTS[operation]


@pytest.mark.parametrize("operation", ROW_BY_ROW)
def test_a_row_does_not_depend_on_the_others(operation: str) -> None:
    """In float32. In bfloat16 many rows of fp8 go to the library, which adds in its own order."""
    for M, N, K in [(700, 1024, 4096), (2500, 500, 12288), (600, 9000, 640)]:
        x, weight = rows_of(operation, M, K), weight_of(operation, N, K)
        everything = fast(operation)(*x, *weight, torch.float32)
        for a, b in [(0, 1), (7, 20), (16, 32), (100, 150), (3, 70), (2, 98), (0, 130), (9, 600)]:
            part = fast(operation)(*(t[a:b] for t in x), *weight, torch.float32)
            assert torch.equal(part, everything[a:b]), f"rows {a} to {b} of {M}"


@pytest.mark.parametrize("operation", PRODUCTS)
@pytest.mark.parametrize("rows", [12, 96, 300, 700])
def test_a_nan_stays_in_its_row(operation: str, rows: int) -> None:
    """The last one, beside which a tile has rows that are not there."""
    x, weight = rows_of(operation, rows, 2048), weight_of(operation, 256, 2048)
    expected = fast(operation)(*x, *weight, torch.float32)
    x[-1][-1] = torch.nan
    result = fast(operation)(*x, *weight, torch.float32)
    assert result[-1].isnan().all()
    assert torch.equal(result[:-1], expected[:-1])


def test_up_to_64_rows_of_w4a16_do_not_depend_on_each_other() -> None:
    x, weight = rows_of("w4a16_matmul", 64, 4096), weight_of("w4a16_matmul", 1024, 4096)
    everything = fast("w4a16_matmul")(*x, *weight, torch.float32)
    for a, b in [(0, 1), (7, 20), (16, 32), (3, 40)]:
        part = fast("w4a16_matmul")(*(t[a:b] for t in x), *weight, torch.float32)
        assert torch.equal(part, everything[a:b]), f"rows {a} to {b}"


@pytest.mark.parametrize("operation", ["w4a16_matmul", "w4a8_matmul", "w4a8_fp8_matmul"])
def test_scales_may_lie_in_either_order(operation: str) -> None:
    x, (codes, scales) = rows_of(operation, 20, 1100), weight_of(operation, 3, 70, 1100)
    assert not scales.is_contiguous()
    bounds = torch.tensor([0, 5, 5, 20], device="cuda", dtype=torch.int32)
    results = [fast(f"grouped_{operation}")(*x, bounds, codes, s, torch.float32) for s in (scales, scales.contiguous())]
    assert torch.equal(*results)
    single = [fast(operation)(*x, codes[1], s[1], torch.float32) for s in (scales, scales.contiguous())]
    assert torch.equal(*single)


@pytest.mark.parametrize("rows", [1, 16, 33, 100, 200])
@pytest.mark.parametrize("K", [128, 384, 768, 1100, 4096])
def test_4_bit_weights_times_16_bit_rows_equal_the_reference(rows: int, K: int) -> None:
    """Steps of one group and of two, whole and not; the sums of one product differ by their order alone."""
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(rows, K, device="cuda").to(dtype)
        packed, scales = weight_of("w4a16_matmul", 200, K)
        result = fast("w4a16_matmul")(x, packed, scales, torch.float32)
        assert distance(result, reference.w4a16_matmul(x, packed, scales, torch.float32)) <= 1e-5


# Tiles that go round once and more, in 1, 2, 4 and more pieces, pieces that straddle tiles, tiles of three groups.
@pytest.mark.parametrize(
    ("N", "K"),
    [(70, 128), (1000, 384), (777, 1408), (2816, 4096), (4096, 12288), (17050, 1024), (6144, 4096), (24500, 512)],
)
def test_65_to_256_rows_of_w4a16_equal_the_reference(N: int, K: int) -> None:
    """And give the same each time: pieces of K are added in their order, whichever is done first."""
    packed, scales = weight_of("w4a16_matmul", N, K)
    for rows in (65, 100, 128, 129, 192, 193, 256):
        x = torch.randn(rows, K, device="cuda").bfloat16()
        results = [fast("w4a16_matmul")(x, packed, scales, torch.float32) for _ in range(3)]
        assert distance(results[0], reference.w4a16_matmul(x, packed, scales, torch.float32)) <= 2e-5, rows
        assert all(torch.equal(result, results[0]) for result in results), rows
        assert torch.equal(fast("w4a16_matmul")(x, packed, scales, torch.bfloat16), results[0].bfloat16()), rows


@pytest.mark.parametrize("operation", ROW_BY_ROW)
def test_an_experts_row_does_not_depend_on_the_others(operation: str) -> None:
    x, weight = rows_of(operation, 400, 2048), weight_of(operation, 2, 256, 2048)
    everything = fast(f"grouped_{operation}")(
        *x, torch.tensor([0, 150, 400], device="cuda", dtype=torch.int32), *weight, torch.float32
    )
    few = fast(f"grouped_{operation}")(
        *(t[148:153] for t in x), torch.tensor([0, 2, 5], device="cuda", dtype=torch.int32), *weight, torch.float32
    )
    assert torch.equal(few, everything[148:153])


@pytest.mark.parametrize(
    ("operation", "rows"),
    [
        *product(PRODUCTS, (16, 64)),
        *product(("fp8_block_matmul", "w4a8_matmul", "w4a8_fp8_matmul"), (600,)),
        ("fp8_block_matmul", 200),
    ],
)
def test_stacked_weights_give_the_products_of_their_parts(operation: str, rows: int) -> None:
    """Also where parts are cut along K and the whole is not."""
    x, parts = rows_of(operation, rows, 12288), [weight_of(operation, N, 12288) for N in (4096, 1024, 8192)]
    whole = fast(operation)(*x, *(torch.cat(tensors) for tensors in zip(*parts, strict=True)), torch.bfloat16)
    apart = torch.cat([fast(operation)(*x, *weight, torch.bfloat16) for weight in parts], -1)
    assert torch.equal(whole, apart)


@pytest.mark.parametrize(("operation", "rows"), [*product(PRODUCTS, (16,)), ("w4a16_matmul", 160)])
def test_replays_of_a_graph_give_the_same(operation: str, rows: int) -> None:
    x, weight = rows_of(operation, rows, 4096), weight_of(operation, 1024, 4096)
    expected = fast(operation)(*x, *weight, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [fast(operation)(*x, *weight, torch.bfloat16) for _ in range(20)]
    for _ in range(5):
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(result, expected) for result in results)
