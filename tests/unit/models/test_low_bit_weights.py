"""The quantized matrices of a model, refreshed after an update."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import PreTrainedModel

from lockstep.config import Plugin
from lockstep.models.fused import TOGETHER, joined_low_bit, product
from lockstep.models.lowbit import LowBitWeights
from lockstep.quant import FORMATS


def test_a_refresh_names_the_master_that_is_not_finite(dense: PreTrainedModel) -> None:
    low_bit = LowBitWeights(copy.deepcopy(dense), Plugin(package=FORMATS, name="int8_w8a8"))
    masters = {name: parameter.detach().clone() for name, parameter in dense.named_parameters()}
    low_bit.refresh(masters)
    bad = low_bit.layers[3].name
    masters[bad][0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match=f"{bad}: it holds NaN or inf"):
        low_bit.refresh(masters)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("format", ["int8_w8a8", "w4a16"])
def test_weights_of_one_input_are_one_product(dense: PreTrainedModel, share: bool, format: str) -> None:
    view = copy.deepcopy(dense)
    low_bit = LowBitWeights(view, Plugin(package=FORMATS, name=format))
    low_bit.run_by_engine(view, share=share)
    attention = view.get_submodule("model.layers.0.self_attn")
    linears = [attention.get_submodule(name) for name in TOGETHER[0]]
    x = torch.randn(3, dense.config.hidden_size)
    assert joined_low_bit(linears) is not None
    qkv = product(attention, TOGETHER[0])
    assert torch.equal(qkv(x), torch.cat([linear(x) for linear in linears], -1))
    linears[1].weight.encoded.copy_(low_bit.format.quantize(torch.randn(linears[1].weight.shape)))
    assert torch.equal(qkv(x), torch.cat([linear(x) for linear in linears], -1))
