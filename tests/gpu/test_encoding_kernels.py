"""Kernels that encode what they compute: the codes of encoding it afterwards, bit for bit, alone and in a model.

On a GPU; or anywhere with triton installed and TRITON_INTERPRET=1, in float32. What an interpreter makes of e4m3 is not
what a GPU does, so both sides encode in Triton here; tests/gpu/test_quant_kernels.py holds that to the reference.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine_support import sharpen
from kernel_support import DEVICE, DTYPES, MARKS
from lockstep.config import Plugin
from lockstep.models import fused
from lockstep.models.engine_view import engine_view
from lockstep.models.kv import KVCache
from lockstep.models.lowbit import LowBitWeights
from lockstep.models.paged import PagedStep, Segment
from lockstep.quant import FORMATS
from lockstep.quant import format as formats
from lockstep.quant.formats.fp8_w8a8 import FP8W8A8
from lockstep.quant.formats.int8_w8a8 import INT8W8A8
from lockstep.quant.formats.w4a8 import W4A8
from lockstep.quant.inputs import EncodedInput, InputCode
from lockstep.quant.kernels import load
from quant_support import build

# the warnings are of the interpreter's numpy: exp, NaN and empty rows
pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
CODES = [InputCode("int8"), InputCode("fp8"), InputCode("fp8", grouped=True)]
SHAPES = [(1, 1, 4096), (1, 4, 300), (2, 2, 96), (1, 3, 1100), (2, 4100), (0, 64)]
SHAPES += [(700, 4096), (1, 65, 12288), (33, 5120)] if DEVICE.type == "cuda" else []
EPS = 1e-6

Make = Callable[[InputCode | None], Any]


def rms_norm(x: Tensor, weight: Tensor) -> Make:
    from lockstep.models.kernels.pointwise import rms_norm

    return lambda code: rms_norm(x, weight, EPS, code)


def add_rms_norm(x: Tensor, weight: Tensor) -> Make:
    from lockstep.models.kernels.pointwise import add_rms_norm

    residual = torch.randn_like(x)
    return lambda code: add_rms_norm(x, residual, weight, EPS, code)[1]


def gated_silu(x: Tensor, weight: Tensor) -> Make:
    from lockstep.models.kernels.pointwise import gated_silu

    gate_up = torch.cat([x, weight.expand_as(x)], -1)
    return lambda code: gated_silu(gate_up, code)


MAKERS = [rms_norm, add_rms_norm, gated_silu]
makers = pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
codes = pytest.mark.parametrize("code", CODES, ids=lambda code: code.quantizer)


def encode_in_triton(operation: str, x: Tensor) -> tuple[Tensor, Tensor]:
    return load(f"triton_rows.{operation}").run(x)


def values(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of any size, with an outlier and, if there are several, one of zeros; and a norm's weight."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.rand((*shape[:-1], 1), generator=generator).mul(8).exp()
    x[..., 0] *= 30
    x.view(-1, shape[-1])[1:2] = 0
    return x.to(DEVICE, dtype), (torch.rand(shape[-1], generator=generator) + 0.5).to(DEVICE, dtype)


@makers
@codes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_those_of_the_value_encoded_afterwards(
    maker: Callable[..., Make], code: InputCode, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    make = maker(*values(shape, dtype))
    encoded, plain = make(code), make(None)
    assert isinstance(encoded, EncodedInput)
    assert (encoded.shape, encoded.dtype, encoded.code) == (plain.shape, plain.dtype, code)
    expected, scales = encode_in_triton(code.quantizer, plain.flatten(0, -2))
    assert torch.equal(encoded.rows[1], scales)
    assert torch.equal(encoded.rows[0].view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_is_the_same_with_a_code(dtype: torch.dtype) -> None:
    from lockstep.models.kernels.pointwise import add_rms_norm

    x, weight = values((1, 5, 300), dtype)
    residual = torch.randn_like(x)
    for code in (None, *CODES):
        assert torch.equal(add_rms_norm(x, residual, weight, EPS, code)[0], x + residual)


@makers
@pytest.mark.parametrize("format", [INT8W8A8(), FP8W8A8(), FP8W8A8(block=True), W4A8()], ids=str)
def test_nan_is_refused_or_stays_in_its_row(maker: Callable[..., Make], format: formats.Format) -> None:
    x, weight = values((1, 3, 256), torch.float32)
    x[0, 1, 5] = torch.nan
    encoded = maker(x, weight)(format.input_code)
    matrix = format.quantize(torch.randn(64, 256, device=DEVICE))
    if DEVICE.type == "cpu":
        with pytest.raises(ValueError, match="NaN or inf"):
            format.linear(encoded, matrix)
    else:
        bad = format.linear(encoded, matrix).isnan()[0]
        assert bad[1].all()
        assert not bad[[0, 2]].any()


def test_an_input_in_another_code_is_refused() -> None:
    format, encoded = INT8W8A8(), rms_norm(*values((3, 256), torch.float32))(InputCode("fp8"))
    with pytest.raises(AssertionError, match="cannot multiply an input in"):
        format.linear(encoded, format.quantize(torch.randn(64, 256, device=DEVICE)))


SHAPE = {"hidden_size": 160, "intermediate_size": 224, "head_dim": 16, "num_hidden_layers": 2}
# Family, format, its options, and how many inputs of a layer are still encoded by a kernel of their own.
MODELS: list[tuple[str, str, dict[str, Any], int]] = [
    ("Qwen3", "int8_w8a8", {}, 1),  # o_proj's
    ("Qwen3", "fp8_w8a8", {}, 1),
    ("Qwen3", "fp8_w8a8", {"block": True}, 1),
    ("Qwen3", "w4a8", {}, 1),
    ("Qwen3", "w4a16", {}, 0),
    ("Qwen2", "int8_w8a8", {}, 1),  # biases
    ("Qwen3Moe", "int8_w8a8", {}, 3),  # routers and experts read the norm as it is
]


def logits(view: PreTrainedModel) -> Tensor:
    """Of 5 tokens as one prefill."""
    positions = torch.arange(5, device=DEVICE)
    cache = KVCache(view.config, num_pages=1, page_size=8, dtype=view.dtype, device=DEVICE)
    pages, count = torch.tensor([[0]], device=DEVICE), torch.tensor([5], device=DEVICE)
    segment = Segment(slice(0, 5), pages, positions[:1], count, longest=5)
    step = PagedStep(cache=cache, slots=positions, segments=[segment])
    tokens = (positions * 37 % 64)[None]
    with torch.inference_mode():
        return view(input_ids=tokens, position_ids=positions[None], use_cache=False, lockstep=step).logits[0].float()


@pytest.mark.parametrize(("family", "precision", "options", "alone"), MODELS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_low_bit_model_computes_the_same(
    family: str,
    precision: str,
    options: dict[str, Any],
    alone: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit what it computes where inputs are encoded by kernels of their own; to rounding what it does without
    any kernels of the engine."""
    module = sharpen(build(family, **SHAPE), std=0.1).to(DEVICE, dtype)
    low_bit = LowBitWeights(module, Plugin(package=FORMATS, name=precision, options=options))

    def view() -> PreTrainedModel:
        return engine_view(copy.deepcopy(module), share=False, low_bit=low_bit)

    encode = Mock(wraps=encode_in_triton)
    monkeypatch.setattr(formats, "encode", encode)
    found = logits(view())
    assert encode.call_count == alone * SHAPE["num_hidden_layers"]
    monkeypatch.setattr(fused, "input_code", lambda part, names: None)
    assert torch.equal(found, logits(view()))
    monkeypatch.setattr("lockstep.models.engine_view.fuse", lambda view: None)
    error = (found - logits(view())).norm() / found.norm()
    assert error < {torch.float32: 0.01, torch.bfloat16: 0.15}[dtype]
