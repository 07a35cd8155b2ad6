"""On a GPU: formats make the codes they make on a CPU, run the kernels of the table, and have the same gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.quant import straight_through
from lockstep.quant.format import Format
from lockstep.quant.kernels import CANDIDATES, load, reference
from quant_support import all_formats, expert

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
formats = pytest.mark.parametrize("format", all_formats(), ids=str)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@formats
@pytest.mark.parametrize("shape", [(256, 1024), (70, 300), (3, 140, 260)], ids=str)
def test_codes_are_those_of_a_cpu(format: Format, shape: tuple[int, ...]) -> None:
    """A weight is published by one machine and audited on another."""
    weight = torch.randn(shape)
    here, there = format.quantize(weight.cuda()), format.quantize(weight)
    assert torch.equal(here.scales.cpu(), there.scales)
    assert torch.equal(here.codes.cpu().view(torch.uint8), there.codes.view(torch.uint8))
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(format.dequantize(here, dtype).cpu(), format.dequantize(there, dtype))


@formats
@pytest.mark.parametrize(("M", "K", "N"), [(1, 512, 256), (300, 1024, 512), (5, 300, 70)])
def test_every_kernel_of_the_table(format: Format, M: int, K: int, N: int) -> None:
    x, encoded = torch.randn(M, K, device="cuda").bfloat16(), format.quantize(torch.randn(N, K, device="cuda"))
    rows = format.encode_input(x)
    expected = getattr(reference, format.operation)(*rows, encoded.codes, encoded.scales, torch.bfloat16)
    for name, can in CANDIDATES["cuda"].get(format.operation, ()):
        if can((N, K), torch.bfloat16):
            got = load(name).run(*rows, encoded.codes, encoded.scales, torch.bfloat16)
            assert distance(got, expected) < 3e-3, name  # a rounding to bfloat16


@formats
def test_inputs_that_are_not_finite_show_in_their_own_row(format: Format) -> None:
    x, encoded = torch.randn(4, 256, device="cuda"), format.quantize(torch.randn(64, 256, device="cuda"))
    x[2, 7] = torch.nan
    bad = ~torch.isfinite(format.linear(x.bfloat16(), encoded))
    assert bad[2].all()
    assert not bad[[0, 1, 3]].any()


@formats
def test_gradients_are_those_of_a_cpu(format: Format) -> None:
    x, weight, dy = torch.randn(96, 256), torch.randn(4, 128, 256), torch.randn(96, 128)
    offsets = torch.tensor([0, 40, 40, 41, 96], dtype=torch.int32)

    def gradients(device: str, dtype: torch.dtype) -> list[Tensor]:
        ours = [t.to(device, dtype, copy=True).requires_grad_() for t in (x, weight, weight[0])]
        rows, experts, single = ours
        encoded = format.quantize(weight.to(device))
        y = straight_through.grouped(rows, offsets.to(device), experts, encoded, format)
        z = straight_through.linear(rows, single, None, expert(encoded, 0), format)
        torch.autograd.backward([y, z], [dy.to(device, dtype), dy.to(device, dtype)])
        return [t.grad.cpu() for t in ours if t.grad is not None]

    for ours, theirs in zip(gradients("cuda", torch.bfloat16), gradients("cpu", torch.float32), strict=True):
        assert distance(ours, theirs) < 2e-2
