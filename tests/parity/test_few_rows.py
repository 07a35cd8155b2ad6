"""Linear layers of few rows on a CPU, computed in another way than PyTorch does, which is faster."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.models.few_rows import ROWS, linear_function, speed_up_few_rows


@pytest.mark.parametrize("rows", [1, *range(ROWS.start - 1, ROWS.start + 4), 16, 17, 25, 26, 64, 65, 128, ROWS.stop])
@pytest.mark.parametrize("bias", [False, True])
def test_the_product_is_the_same(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(1024, 1100, bias=bias)
    x = torch.randn(1, rows, 1024)
    expected = linear(x)
    speed_up_few_rows(linear)
    found = linear(x)
    assert torch.equal(linear_function(linear.weight)(x, weight=linear.weight, bias=linear.bias), found)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_small_weights_and_other_dtypes_are_left_alone() -> None:
    for linear in (nn.Linear(64, 64), nn.Linear(1024, 1100, dtype=torch.bfloat16)):
        speed_up_few_rows(linear)
        assert "forward" not in vars(linear)
        assert linear_function(linear.weight) is nn.functional.linear


@pytest.mark.skipif(linear_function(torch.empty(1024, 1100)) is F.linear, reason="not measured on such a CPU")
def test_weights_copied_in_place_are_seen() -> None:
    linear = nn.Linear(1024, 1100, bias=False)
    speed_up_few_rows(linear)
    assert "forward" in vars(linear)
    with torch.no_grad():
        linear.weight.zero_()
    assert not linear(torch.randn(16, 1024)).any()
