"""The quantized matrices of a model, refreshed after an update."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import PreTrainedModel

from lockstep.config import Plugin
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
