"""Weights that one product reads lie side by side, and are still the parameters they were."""

from __future__ import annotations

import torch

from engine_support import small
from lockstep.models.engine_view import engine_view
from lockstep.models.fused import TOGETHER, joined, lay_together


def test_a_second_view_leaves_the_first_where_it_is() -> None:
    """Weights move together once; what shares them, an earlier view or an optimiser, keeps seeing their updates."""
    module = small()
    first, second = engine_view(module, share=True), engine_view(module, share=True)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(3.0)
    for view in (first, second):
        assert all((p == 3.0).all() for p in view.parameters())
        for layer in view.model.layers:
            for part, names in zip((layer.self_attn, layer.mlp), TOGETHER, strict=True):
                whole = joined([part.get_submodule(name).weight for name in names])
                assert whole is not None
                assert (whole == 3.0).all()


def test_weights_that_lie_together_stay_what_they_were() -> None:
    module = small()
    before = {name: p.clone() for name, p in module.named_parameters()}
    identities = {name: id(p) for name, p in module.named_parameters()}
    lay_together(module)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])
        assert id(parameter) == identities[name], "an optimiser holds the parameter itself"
        assert parameter.requires_grad
