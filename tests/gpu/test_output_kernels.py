"""The kernels of the output layer: against torch, and a row by itself against the same row among others.

On a GPU; or anywhere with triton installed and TRITON_INTERPRET=1, in float32.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernel_support import DEVICE, DTYPES, ERROR, MARKS

pytestmark = MARKS
SHAPES = [(64, 130), (200, 261), (1024, 1000)]  # inputs, vocabulary


@pytest.mark.parametrize(("width", "vocab"), SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 40, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_torch(rows: int, width: int, vocab: int, bias: bool) -> None:
    from lockstep.models.kernels.output import linear

    dtype = DTYPES[-1]  # on a GPU for bfloat16 alone
    torch.manual_seed(0)
    x, weight = torch.randn(1, rows, width, device=DEVICE, dtype=dtype), torch.randn(vocab, width, device=DEVICE)
    weight, b = weight.to(dtype), torch.randn(vocab, device=DEVICE, dtype=dtype) if bias else None
    found = linear(x, weight, b, torch.float32)
    expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
    assert found.shape == (1, rows, vocab)
    torch.testing.assert_close(found.double(), expected, atol=1e-5 * width, rtol=1e-5)
    assert torch.equal(linear(x, weight, b, dtype), found.to(dtype))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="tensor cores, of which it is asked")
@pytest.mark.parametrize(("width", "vocab"), [*SHAPES, (4096, 2048)])
def test_a_row_does_not_depend_on_others(width: int, vocab: int) -> None:
    from lockstep.models.kernels.output import linear

    torch.manual_seed(0)
    x = torch.randn(600, width, device=DEVICE).bfloat16()
    weight = torch.randn(vocab, width, device=DEVICE).bfloat16()
    whole = linear(x, weight, None, torch.float32)
    for rows in (1, 2, 9, 16, 17, 33, 64, 65, 128, 129, 256, 257):
        first = 600 - rows
        assert torch.equal(linear(x[first:], weight, None, torch.float32), whole[first:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [261, 4096, 9000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_bit_for_bit_those_of_what_was_drawn(temperature: float, vocab: int, dtype: torch.dtype) -> None:
    from lockstep.models.kernels.output import log_probs
    from lockstep.rollout.kernels import draw

    torch.manual_seed(0)
    logits = (3 * torch.randn(50, vocab, device=DEVICE)).to(dtype)
    numbers = torch.arange(50, device=DEVICE)
    tokens, logp = draw(
        logits, torch.full((50,), temperature, device=DEVICE), torch.zeros_like(numbers), numbers, numbers
    )
    found, lse, _ = log_probs(logits, tokens, temperature)
    assert torch.equal(found, logp)
    z = logits.double() / temperature
    torch.testing.assert_close(lse.double(), z.logsumexp(-1), atol=ERROR[torch.float32], rtol=1e-6)
    torch.testing.assert_close(found.double(), z.log_softmax(-1).gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=1e-5)
