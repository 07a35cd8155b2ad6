"""Whose routers are followed, by what the recipe makes of them."""

from __future__ import annotations

import pytest
from transformers import PhimoeConfig, PhimoeForCausalLM, PreTrainedModel

from engine_support import small
from lockstep.assembly.roles import routers_of
from lockstep.config import ConfigError
from lockstep.models.loading import Loaded
from lockstep.models.tiny import byte_tokenizer
from role_support import make_recipe


def phimoe() -> PreTrainedModel:
    """It does not choose by topk."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return PhimoeForCausalLM(PhimoeConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, num_local_experts=4))


@pytest.mark.parametrize("routing", ["r3", "r2", "off"])
def test_routers_are_followed_in_every_mode(routing: str) -> None:
    recipe = make_recipe(None, experts=4, routing=routing)
    routers = routers_of(recipe, Loaded.of(small(experts=4), byte_tokenizer()))
    assert routers is not None
    assert routers.num_experts == 4
    assert routers_of(recipe, Loaded.of(small(), byte_tokenizer())) is None


def test_a_mixture_that_cannot_be_followed_trains_with_routing_off_and_it_is_told() -> None:
    loaded, told = Loaded.of(phimoe(), byte_tokenizer()), []
    assert routers_of(make_recipe(None, routing="off"), loaded, told.append) is None
    assert "experts are neither recorded nor compared: the expert routes of PhimoeForCausalLM" in told[0]
    assert "learner.routing" not in told[0], "it is off"
    with pytest.raises(ConfigError, match=r'PhimoeForCausalLM cannot be replayed: .*; learner.routing = "off" trains'):
        routers_of(make_recipe(None, routing="r3"), loaded)
