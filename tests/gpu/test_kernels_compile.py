"""Our kernels compile for a Hopper GPU, on a machine without one: the interpreter accepts more than the compiler.

Needs triton, which the installation for a CPU does not bring: `pip install triton`, then `pytest -m gpu` on this file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests run the kernels"),
    pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="the interpreter compiles nothing"),
]
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HEADS, GROUP, SIZE, PAGE = 8, 4, 128, 16


class Hopper:
    """As much of a driver as the compiler asks for."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Launches compile and do nothing else; their names."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    names: list[str] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        assert run(self, *args, grid=grid, warmup=True, **options) is not None
        names.append(self.__name__)

    monkeypatch.setattr(JITFunction, "run", compile_only)
    driver.set_active(Hopper())
    yield names
    driver._active = None


def pages(dtype: torch.dtype, size: int = SIZE) -> Any:
    from lockstep.models.kv import Pages

    shape = (4, PAGE, HEADS, size)
    scales = (torch.ones(4, HEADS, PAGE),) * 2 if dtype == E4M3 else (None, None)
    return Pages(torch.zeros(shape).to(dtype), torch.zeros(shape).to(dtype), *scales)


def numbers(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


def spans(count: int) -> Any:
    from lockstep.models.kv import Spans

    return Spans.of(numbers(2), numbers(2) + count)


@pytest.mark.parametrize("cache", [BF16, E4M3])
@pytest.mark.parametrize(("splits", "tile"), [(1, "LARGE"), (1, "SMALL"), (4, "LARGE"), (4, "SMALL"), (4, "MANY")])
@pytest.mark.parametrize("shared", [False, True])
def test_decode_attention(
    cache: torch.dtype, splits: int, tile: str, shared: bool, monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    from lockstep.models.kernels import attention
    from lockstep.models.paged import Shared

    monkeypatch.setattr(attention, "num_splits", lambda programs, processors: splits)
    monkeypatch.setattr(attention, "choose_tile", lambda *of: getattr(attention, tile))
    query, groups = torch.zeros(16, HEADS * GROUP, SIZE, dtype=BF16), Shared(*numbers(4, 16)) if shared else None
    attention.decode(query, pages(cache), numbers(16, 4), numbers(16), 0.1, None, groups)
    assert compiled == ["_decode"] + ["_combine"] * (splits > 1 or shared)


@pytest.mark.parametrize("rows", [16, 256])
@pytest.mark.parametrize("shared", [False, True])
def test_exact_attention(rows: int, shared: bool, compiled: list[str]) -> None:
    from lockstep.models.kernels import attention
    from lockstep.models.paged import Shared

    query, groups = torch.zeros(rows, HEADS * GROUP, SIZE, dtype=BF16), Shared(*numbers(4, rows)) if shared else None
    attention.decode(query, pages(BF16), numbers(rows, 4), numbers(rows), 0.1, None, groups, exact=True)
    assert compiled == ["_decode"] + ["_combine"] * (rows == 16 or shared)


@pytest.mark.parametrize("size", [32, 64, 256])
def test_attention_to_8_bits_with_other_heads(size: int, compiled: list[str]) -> None:
    from lockstep.models.kernels import attention

    query = torch.zeros(512, HEADS * GROUP, size, dtype=BF16)
    attention.decode(query, pages(E4M3, size), numbers(512, 4), numbers(512), 0.1, None)
    attention.prefill(query, pages(E4M3, size), numbers(2, 16), spans(256), 256, 0.1, None)
    assert compiled == ["_decode", "_prefill"]


def test_two_warps_hold_few_sums() -> None:
    """They have no registers for those of 8 members with 8 queries each."""
    from lockstep.models.kernels.attention import LARGE, MANY, SMALL, choose_tile

    assert choose_tile(256, 132, 4, 128) == choose_tile(256, 132, 8 * 4, 128) == SMALL
    assert choose_tile(2048, 132, 4, 128) == choose_tile(2048, 132, 8 * 2, 128) == LARGE
    assert choose_tile(256, 132, 8 * 8, 128) == choose_tile(2048, 132, 8 * 4, 128) == MANY
    assert choose_tile(2048, 132, 4, 128, num_bytes=4) == MANY


@pytest.mark.parametrize("programs", [8, 256, 768, 2048])
@pytest.mark.parametrize("queries", [1, 4, 32, 64])
def test_exact_tiles_have_the_same_keys(programs: int, queries: int) -> None:
    from lockstep.models.kernels.attention import BLOCK, choose_tile

    assert choose_tile(programs, 132, queries, 128, exact=True).keys == BLOCK


@pytest.mark.parametrize(
    ("programs", "splits", "tile"),
    [(8, 32, "SMALL"), (96, 8, "SMALL"), (256, 3, "SMALL"), (528, 1, "SMALL"), (768, 3, "LARGE"), (2048, 1, "LARGE")],
)
def test_small_and_uneven_batches_cut_their_keys(programs: int, splits: int, tile: str) -> None:
    from lockstep.models.kernels import attention

    assert attention.num_splits(programs, 132) == splits
    assert attention.choose_tile(programs, 132, 4, 128) == getattr(attention, tile)


@pytest.mark.parametrize(("group", "size"), [(1, 128), (2, 64), (4, 128), (20, 128)])
def test_dealt_attention(group: int, size: int, compiled: list[str]) -> None:
    from lockstep.models.kernels import dealt

    assert dealt.suits(16, pages(BF16, size), HEADS * group)
    work = dealt.deal(numbers(16), HEADS, PAGE)
    query = torch.empty(16, HEADS * group, size, dtype=BF16)
    dealt.decode(query, pages(BF16, size), numbers(16, 12), work, 1.0)
    assert compiled == ["_deal", "_decode"]


def test_a_batch_size_more_compiles_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first start compiles for as long as it may take. Decode attention, cut into pieces or not, and dealt out."""
    from lockstep.models.kernels import attention, dealt

    started: list[str] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, src, **_: started.append(src.name))
    for kernel in (dealt._deal, dealt._decode, attention._decode):
        kernel.device_caches.clear()
    for batch in (9, 16, 24, 128):
        work = dealt.deal(numbers(batch), HEADS, PAGE)
        dealt.decode(torch.empty(batch, HEADS * 2, SIZE, dtype=BF16), pages(BF16), numbers(batch, 12), work, 1.0)
    for batch in (160, 224, 256, 512):
        query = torch.empty(batch, HEADS * 2, SIZE, dtype=BF16)
        attention.decode(query, pages(BF16), numbers(batch, 12), numbers(batch), 1.0, None)
    assert [name for name in started if name != "_combine"] == ["_deal", "_decode", "_decode"]


@pytest.mark.parametrize("rows", [1, 32, 64, 128])
def test_products_of_few_rows(rows: int, compiled: list[str]) -> None:
    from lockstep.models.kernels import few_rows

    few_rows.linear(torch.empty(rows, 1024, dtype=BF16), torch.empty(6144, 1024, dtype=BF16))
    assert few_rows.cut(rows, 6144, 1024, 132).rows == max(16, rows)
    assert compiled == ["_linear"]


def test_larger_weights_are_the_librarys_with_fewer_rows() -> None:
    from lockstep.models.few_rows import pays
    from lockstep.models.kernels import few_rows

    small, large, head = (torch.empty(size, 2**10, device="meta") for size in (2**13, 2**14, 2**18))
    assert [max(rows for rows in range(300) if pays(rows, w)) for w in (small, large, head)] == [128, 64, 32]
    assert pays(few_rows.MOST_ROWS, small)
    assert [rows for rows in (32, 33, 47, 48) if pays(rows, large)] == [32, 48]


@pytest.mark.parametrize("M", [1, 16, 33, 64, 80, 128])
def test_products_of_few_rows_are_cut_evenly(M: int) -> None:
    """Every step is somebody's, and no tile is in more pieces than there is room for."""
    from lockstep.models.kernels.few_rows import OUTPUTS, cut

    for N, K, processors in product((64, 1024, 5000, 24576), (8, 1000, 3072, 12288), (78, 132)):
        work = cut(M, N, K, processors)
        tiles = -(-M // work.rows) * -(-N // OUTPUTS.value)
        assert work.total == tiles * work.steps <= work.programs * work.share
        assert work.programs <= processors
        first = (tile * work.steps // work.share for tile in range(tiles))
        last = (((tile + 1) * work.steps - 1) // work.share for tile in range(tiles))
        assert max(b - a for a, b in zip(first, last, strict=True)) < work.pieces


@pytest.mark.parametrize("cache", [BF16, E4M3])
@pytest.mark.parametrize("window", [None, 32])
def test_prefill_attention(cache: torch.dtype, window: int | None, compiled: list[str]) -> None:
    from lockstep.models.kernels import attention

    query = torch.zeros(256, HEADS * GROUP, SIZE, dtype=BF16)
    attention.prefill(query, pages(cache), numbers(2, 16), spans(128), 128, 0.1, window)
    lse = torch.zeros(HEADS * GROUP, 256)
    attention.prefill(query, pages(cache), numbers(2, 16), spans(128), 128, 0.1, window, lse, exact=True)
    assert compiled == ["_prefill"] * 2


@pytest.mark.parametrize("cache", [BF16, E4M3])
@pytest.mark.parametrize("norm", [False, True])
def test_heads_are_rotated_and_stored(cache: torch.dtype, norm: bool, compiled: list[str]) -> None:
    from lockstep.models.kernels.pointwise import rotate_and_store

    qkv = torch.zeros(16, (GROUP + 2) * HEADS * SIZE, dtype=BF16)
    table, weight = torch.zeros(16, SIZE, dtype=BF16), torch.ones(SIZE, dtype=BF16)
    rotate_and_store(qkv, (weight, weight) if norm else None, 1e-6, (table, table), numbers(16), pages(cache))
    assert compiled == ["_rotate_and_store"]


@pytest.mark.parametrize("kind", [None, "int8", "fp8", "groups"])
def test_norms_and_gates(kind: str | None, compiled: list[str]) -> None:
    from lockstep.models.kernels.pointwise import add_rms_norm, gated_silu, rms_norm
    from lockstep.quant.inputs import InputCode

    code = InputCode("int8" if kind == "int8" else "fp8", grouped=kind == "groups") if kind else None
    x, weight = torch.zeros(16, 4096, dtype=BF16), torch.ones(4096, dtype=BF16)
    rms_norm(x, weight, 1e-6, code)
    add_rms_norm(x, x, weight, 1e-6, code)
    gated_silu(x, code)
    assert len(compiled) == 3


def test_rows_of_a_burst_and_their_angles(compiled: list[str]) -> None:
    from lockstep.models.kernels.pointwise import rotary
    from lockstep.rollout.burst_kernels import look_up, move_on
    from lockstep.rollout.burst_state import State

    state = State(*numbers(5, 16))
    places = look_up(state, numbers(9, 100), numbers(3, 9), torch.ones(3, 9), PAGE, 7)
    rotary(torch.ones(SIZE // 2), 1.0, places.start[None], BF16)
    move_on(state, numbers(16), torch.zeros(16), numbers(3), numbers(32, 16), torch.zeros(32, 16))
    assert compiled == ["_look_up", "_rotary", "_move_on"]


def test_experts_and_draws(compiled: list[str]) -> None:
    from lockstep.models.kernels import experts
    from lockstep.rollout.kernels import draw

    ids, weight = numbers(16, 8), torch.zeros(128, 1536, 2048, dtype=BF16)
    order, offsets = experts.group(ids, 128)
    y = experts.product(torch.zeros(16, 2048, dtype=BF16), weight, order, offsets, 8, gather=True)
    experts.product(torch.zeros(128, 2048, dtype=BF16), weight, order, offsets, 8, gather=False)
    experts.combine(y, torch.zeros(16, 8))
    logits, greedy = torch.zeros(16, 151_936, dtype=BF16), torch.zeros(16, dtype=torch.bool)
    draw(logits, torch.ones(16), greedy, numbers(16), numbers(16))
    assert {"_count", "_place", "_product", "_combine", "_survey", "_pick"} <= set(compiled)


@pytest.mark.parametrize("rows", [1, 32, 64, 128, 300])
def test_exact_logits(rows: int, compiled: list[str]) -> None:
    from lockstep.models.kernels.output import linear, log_probs

    weight = torch.zeros(151_936, 1024, dtype=BF16)
    logits = linear(torch.zeros(rows, 1024, dtype=BF16), weight, None, BF16)
    log_probs(logits, numbers(rows), 1.0)
    assert compiled == ["_linear", "_survey", "_log_probs"]


def test_exact_norms(compiled: list[str]) -> None:
    from lockstep.models.kernels.pointwise import Exact

    x, weight = torch.zeros(16, 4096, dtype=BF16), torch.ones(4096, dtype=BF16)
    Exact.rms_norm(x, weight, 1e-6)
    Exact.add_rms_norm(x, x, weight, 1e-6)
    assert compiled == ["_rms_norm", "_rms_norm"]


@pytest.mark.parametrize("norm", [False, True])
def test_what_the_learner_differentiates(norm: bool, compiled: list[str]) -> None:
    from lockstep.models.kernels import differentiable as ours

    def both(y: Tensor) -> None:
        y.backward(torch.zeros_like(y))

    x, weight = torch.zeros(16, 4096, dtype=BF16, requires_grad=True), torch.ones(4096, dtype=BF16, requires_grad=True)
    both(ours.rms_norm(x, weight, 1e-6))
    both(ours.gated_silu(x, x))
    table, weight = torch.zeros(1, 16, SIZE, dtype=BF16), torch.ones(SIZE, dtype=BF16, requires_grad=True)
    both(ours.rotated(x.unflatten(1, (-1, SIZE)), weight if norm else None, 1e-6, (table, table)))
    forward = ["_rms_norm", "_gate", "_rotate"]
    assert compiled == [name for kernel in forward for name in (kernel, f"{kernel}_gradient")]


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_gradients_of_log_probs(dtype: torch.dtype, compiled: list[str]) -> None:
    from lockstep.models.kernels.output import log_prob_gradients

    logits, row = torch.zeros(16, 151_936, dtype=dtype), torch.zeros(16)
    log_prob_gradients(logits, numbers(16), row, row, 1.0, BF16)
    assert compiled == ["_log_prob_gradients"]


def codes(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=torch.int8).view(dtype)


def test_tiles_of_64_rows_are_halved_where_they_leave_half_of_the_device_idle() -> None:
    """By half a tile, not by a part of K: that would change results."""
    from lockstep.quant.kernels.triton_eight import plan_for

    few, in_parts, many = (plan_for("fp8", 64, N, K) for N, K in ((4096, 4096), (4096, 12288), (6144, 4096)))
    assert (few.grid, few.chunks) == ((2, 64, 1), 1)
    assert (in_parts.grid, in_parts.chunks) == ((1, 64, 2), 2)
    assert (many.grid, many.chunks) == ((1, 96, 1), 1)
    assert plan_for("fp8", 32, 4096, 4096).grid == plan_for("fp8", 16, 4096, 4096).grid == (1, 64, 1)


def four_bit_weight(*experts: int) -> tuple[Tensor, Tensor]:
    """Scales lie as the engine has them, group by group."""
    return torch.zeros(*experts, 1024, 2048, dtype=torch.uint8), torch.ones(*experts, 32, 1024).mT


@pytest.mark.parametrize("rows", [1, 16, 64, 128])
def test_low_bit_products(rows: int, compiled: list[str]) -> None:
    from lockstep.quant.kernels import triton_eight, triton_four

    one = torch.ones(rows)
    for kind, matmul in ((torch.int8, triton_eight.int8_matmul), (E4M3, triton_eight.fp8_matmul)):
        matmul(codes(rows, 4096, dtype=kind), one, codes(1024, 4096, dtype=kind), torch.ones(1024), BF16)
    blocks, weight = torch.ones(rows, 32), codes(1024, 4096, dtype=E4M3)
    triton_eight.fp8_block_matmul(codes(rows, 4096, dtype=E4M3), blocks, weight, torch.ones(8, 32), BF16)
    weight = codes(9000, 256, dtype=E4M3)
    triton_eight.fp8_block_matmul(codes(rows, 256, dtype=E4M3), torch.ones(rows, 2), weight, torch.ones(71, 2), BF16)
    triton_four.w4a8_matmul(codes(rows, 4096, dtype=torch.int8), one, *four_bit_weight(), BF16)
    triton_four.w4a8_fp8_matmul(codes(rows, 4096, dtype=E4M3), one, *four_bit_weight(), BF16)
    for dtype in (BF16, torch.float16):
        triton_four.w4a16_matmul(torch.zeros(rows, 4096, dtype=dtype), *four_bit_weight(), dtype)
    wide = rows > 64  # a kernel of its own for bfloat16 times 4-bit weights
    assert set(compiled) == {"_eight_bit", "_four_bit", *["_wide"] * wide}
    assert compiled.count("_four_bit") == 4 - wide


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_4_bit_weights_times_up_to_256_rows(dtype: torch.dtype, compiled: list[str]) -> None:
    from lockstep.quant.kernels import gluon_four, triton_four
    from lockstep.quant.kernels.triton_configs import wide_tiles

    for rows in (65, 128, 160, 192):
        for tile in wide_tiles(rows):
            gluon_four.w4a16_matmul(torch.zeros(rows, 4096, dtype=BF16), *four_bit_weight(), dtype, (tile,))
    triton_four.w4a16_matmul(torch.zeros(256, 4096, dtype=BF16), *four_bit_weight(), dtype)
    triton_four.w4a16_matmul(torch.zeros(128, 1088, dtype=BF16), *four_bit_weight(), dtype)  # no multiple of 128
    assert compiled == ["_wide"] * 9 + ["_four_bit"]


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_low_bit_products_of_many_rows(dtype: torch.dtype, compiled: list[str]) -> None:
    from lockstep.quant.kernels import triton_eight, triton_four

    weight, one = (codes(1024, 4096, dtype=E4M3), torch.ones(8, 32)), torch.ones(2048)
    for rows in (200, 2048):
        triton_eight.fp8_block_matmul(codes(rows, 4096, dtype=E4M3), torch.ones(rows, 32), *weight, dtype)
    triton_four.w4a8_matmul(codes(2048, 4096, dtype=torch.int8), one, *four_bit_weight(), dtype)
    triton_four.w4a8_fp8_matmul(codes(2048, 4096, dtype=E4M3), one, *four_bit_weight(), dtype)
    assert compiled == ["_fp8_blocks"] * 2 + ["_four_bits"] * 2


@pytest.mark.parametrize("rows", [65, 160, 256])
def test_work_is_dealt_out_evenly(rows: int) -> None:
    from lockstep.quant.kernels.gluon_deal import MOST_PIECES, deal
    from lockstep.quant.kernels.triton_configs import wide_tiles

    weights = product((1, 128, 5000, 16896, 151_936), (128, 1408, 12288))
    for tile, (N, K), processors in product(wide_tiles(rows), weights, (78, 132)):
        work, steps = deal(tile, rows, N, K, processors), K // 128
        tiles = -(-rows // tile.all_rows) * -(-N // tile.outputs)
        assert work.programs <= processors
        assert work.rounds * work.programs * steps + work.rest == tiles * steps
        assert work.rest <= work.programs * work.share <= work.rest + processors * work.share
        assert steps <= MOST_PIECES * work.share <= MOST_PIECES * steps


def test_large_tiles_are_for_weights_that_they_need_not_be_cut_for() -> None:
    from lockstep.quant.kernels.gluon_deal import choose
    from lockstep.quant.kernels.triton_configs import wide_tiles

    def groups(rows: int, N: int, K: int) -> int:
        return choose(wide_tiles(rows), rows, N, K, 132)[0].groups

    assert [groups(rows, 24576, 4096) for rows in (65, 192, 256)] == [3] * 3
    assert [groups(rows, N, K) for rows in (65, 256) for N, K in ((6144, 4096), (4096, 12288), (100, 256))] == [2] * 6


@pytest.mark.parametrize("rows", [16, 256])
def test_low_bit_products_of_experts(rows: int, compiled: list[str]) -> None:
    from lockstep.quant.kernels import triton_eight, triton_four

    offsets, one = torch.zeros(9, dtype=torch.int32), torch.ones(rows)
    for kind, matmul in ((torch.int8, triton_eight.grouped_int8_matmul), (E4M3, triton_eight.grouped_fp8_matmul)):
        weight, scales = codes(8, 1024, 4096, dtype=kind), torch.ones(8, 1024)
        matmul(codes(rows, 4096, dtype=kind), one, offsets, weight, scales, BF16)
    triton_four.grouped_w4a16_matmul(torch.zeros(rows, 4096, dtype=BF16), offsets, *four_bit_weight(8), BF16)
    x = codes(rows, 4096, dtype=torch.int8)
    triton_four.grouped_w4a8_matmul(x, one, offsets, *four_bit_weight(8), BF16)
    assert compiled == ["_eight_bit"] * 2 + ["_four_bit"] * 2


def test_quantizers(compiled: list[str]) -> None:
    from lockstep.quant.kernels import triton_rows, triton_weights

    x = torch.zeros(16, 4096, dtype=BF16)
    for quantize in (triton_rows.quantize_rows_int8, triton_rows.quantize_rows_fp8, triton_rows.quantize_groups_fp8):
        quantize(x)
    packed, scales = triton_weights.quantize_int4(torch.zeros(1024, 4096))
    triton_weights.dequantize_int4(packed, scales, 4096, BF16)
    assert compiled == ["_quantize_row"] * 3 + ["_quantize_int4", "_dequantize_int4"]
