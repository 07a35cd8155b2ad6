"""Low-bit forward, high-precision backward: gradients in closed form, what is kept, and learning through it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.quant import straight_through
from lockstep.quant.encoded import Encoded
from lockstep.quant.format import Format
from quant_support import all_formats

formats = pytest.mark.parametrize("format", all_formats(), ids=str)


def decoded(format: Format, x: Tensor, encoded: Encoded) -> tuple[Tensor, Tensor]:
    """x̂ and ŵ: what was really multiplied."""
    rows = format.decode_input(format.encode_input(x.detach()), torch.float32)
    return rows, format.dequantize(encoded, torch.float32)


@formats
def test_gradients_of_a_linear_layer(format: Format) -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(s, requires_grad=True) for s in ((2, 5, 140), (24, 140), (24,)))
    encoded = format.quantize(weight.detach())
    y = straight_through.linear(x, weight, bias, encoded, format)
    assert torch.equal(y, format.linear(x.detach(), encoded, bias.detach()))

    dy = torch.randn_like(y)
    y.backward(dy)
    x_hat, w_hat = decoded(format, x.flatten(0, 1), encoded)
    torch.testing.assert_close(x.grad, dy @ w_hat)
    torch.testing.assert_close(weight.grad, dy.flatten(0, 1).T @ x_hat)
    torch.testing.assert_close(bias.grad, dy.sum((0, 1)))


@formats
def test_layers_that_share_their_input(format: Format) -> None:
    """As each by itself, but for the sum that x gets."""
    torch.manual_seed(0)
    x, upstream = torch.randn(2, 5, 140, requires_grad=True), torch.randn(2, 5, 24)
    layers = [(torch.randn(24, 140, requires_grad=True), b) for b in (None, torch.randn(24, requires_grad=True), None)]
    given = [(weight, bias, format.quantize(weight.detach())) for weight, bias in layers]
    leaves = [x, *(tensor for layer in layers for tensor in layer if tensor is not None)]

    together = straight_through.linears(x, given, format)
    apart = [straight_through.linear(x, *layer, format) for layer in given]
    found, expected = (torch.autograd.grad(ys, leaves, [upstream * i for i in (1, 2, 3)]) for ys in (together, apart))
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))
    torch.testing.assert_close(found[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(found[1:], expected[1:], strict=True))


@formats
def test_gradients_of_experts(format: Format) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, 140, requires_grad=True), torch.randn(4, 24, 140, requires_grad=True)
    encoded = format.quantize(weight.detach())
    offsets = torch.tensor([0, 4, 4, 5, 9], dtype=torch.int32)
    y = straight_through.grouped(x, offsets, weight, encoded, format)
    assert torch.equal(y, format.grouped(x.detach(), offsets, encoded))

    dy = torch.randn_like(y)
    y.backward(dy)
    x_hat, w_hat = decoded(format, x, encoded)
    expert = torch.tensor([0] * 4 + [2] + [3] * 4)
    torch.testing.assert_close(x.grad, torch.einsum("no,noi->ni", dy, w_hat[expert]))
    chosen = F.one_hot(expert, 4).float()
    torch.testing.assert_close(weight.grad, torch.einsum("ne,no,ni->eoi", chosen, dy, x_hat))


@formats
def test_bfloat16_gradients_reach_a_bfloat16_weight(format: Format) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 130).bfloat16().requires_grad_()
    weight = torch.randn(16, 130).bfloat16().requires_grad_()
    encoded = format.quantize(weight.detach().float())
    straight_through.linear(x, weight, None, encoded, format).sum().backward()
    x_hat, w_hat = decoded(format, x, encoded)
    assert x.grad is not None
    assert weight.grad is not None
    assert x.grad.dtype == weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(x.grad.float(), w_hat.sum(0).expand(6, -1), rtol=0.02, atol=0.2)
    torch.testing.assert_close(weight.grad.float(), x_hat.sum(0).expand(16, -1), rtol=0.02, atol=0.1)


@formats
def test_what_is_kept_for_backward(format: Format) -> None:
    """The encoded rows, and references to the encoded weight: no copy of it and nothing in high precision."""
    x, weight = torch.randn(64, 256, requires_grad=True), torch.randn(32, 256, requires_grad=True)
    encoded = format.quantize(weight.detach())
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        straight_through.linear(x, weight, None, encoded, format)
    ours = {encoded.codes.data_ptr(), encoded.scales.data_ptr()}
    new = sum(t.numel() * t.element_size() for t in kept if t.data_ptr() not in ours | {x.data_ptr()})
    rows = format.encode_input(x.detach())
    assert ours <= {t.data_ptr() for t in kept}
    assert new == (0 if len(rows) == 1 else sum(t.numel() * t.element_size() for t in rows))


def test_codes_may_not_change_before_backward() -> None:
    format = all_formats()[0]
    x, weight = torch.randn(4, 64), torch.randn(8, 64, requires_grad=True)
    encoded = format.quantize(weight.detach())
    y = straight_through.linear(x.requires_grad_(), weight, None, encoded, format)
    encoded.copy_(format.quantize(torch.randn(8, 64)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class TwoLayers(nn.Module):
    """With a format: aligned, as the learner runs; without: the high-precision twin."""

    def __init__(self, format: Format | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 8)
        self.format = format

    def forward(self, x: Tensor) -> Tensor:
        return self._layer(self.down, F.silu(self._layer(self.up, x)))

    def _layer(self, layer: nn.Linear, x: Tensor) -> Tensor:
        if self.format is None:
            return layer(x)
        encoded = self.format.quantize(layer.weight.detach())
        return straight_through.linear(x, layer.weight, layer.bias, encoded, self.format)


class Teacher:
    """Labels drawn from a random net's distribution, as a sampler draws tokens."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.up, self.down = self._normal(64, 32) / 4, self._normal(32, 8)

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        x = self._normal(count, 64)
        chances = (torch.tanh(x @ self.up) @ self.down).softmax(-1)
        return x, torch.multinomial(chances, 1, generator=self.generator)[:, 0]

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)


def learned_loss(net: TwoLayers, updates: int = 200) -> float:
    """Held-out loss after training; that of knowing nothing is log 8 = 2.08."""
    teacher = Teacher()
    x_held, y_held = teacher.draw(2048)
    optimiser = torch.optim.Adam(net.parameters())
    for update in range(updates):
        x, y = teacher.draw(128)
        optimiser.param_groups[0]["lr"] = 1e-2 * (1 - update / updates)
        optimiser.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimiser.step()
    with torch.no_grad():
        return F.cross_entropy(net(x_held), y_held).item()


@pytest.fixture(scope="module")
def twin_loss() -> float:
    loss = learned_loss(TwoLayers(None))
    assert loss < 0.7 * learned_loss(TwoLayers(None), updates=0)
    return loss


@formats
def test_an_aligned_net_learns_as_well_as_its_twin(format: Format, twin_loss: float) -> None:
    assert learned_loss(TwoLayers(format)) <= 1.02 * twin_loss
