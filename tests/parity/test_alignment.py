"""A low-bit sampler and a learner that computes the same thing: one function, on the same bytes, after every update."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import Tensor

from lockstep.config import Plugin
from lockstep.models.lowbit import LowBitWeights
from lockstep.models.tiny import TinyModel, tiny_model
from lockstep.quant import FORMATS
from lockstep.quant.encoded import Encoded
from lockstep.quant.format import Format
from lockstep.quant.formats.w4a16 import W4A16
from quant_support import all_formats, same_bytes
from role_support import as_written, engine_formats, engine_state, gaps, low_bit_of, make_recipe, started, take_step

DENSE, MIXTURE = 0, 4
SHARED, OWN_BUFFERS = 0, 1  # max_staleness decides
four_bits = pytest.mark.parametrize("precision", ["w4a16", "w4a8"])
experts = pytest.mark.parametrize("experts", [DENSE, MIXTURE], ids=["dense", "mixture"])
memory = pytest.mark.parametrize("max_staleness", [SHARED, OWN_BUFFERS], ids=["shared", "own-buffers"])


def gaps_over_updates(precision: object, steps: int = 1, **settings: object) -> list[Tensor]:
    """Before the first and after each step."""

    async def run() -> list[Tensor]:
        async with started(make_recipe(precision, **settings)) as roles:  # type: ignore[arg-type]
            found = [await gaps(roles)]
            for _ in range(steps):
                await take_step(roles)
                found.append(await gaps(roles))
            return found

    return asyncio.run(run())


def assert_aligned(found: list[Tensor]) -> None:
    """Attention sums in another order on the two sides, so that the code of an input may now and then tip."""
    for tokens in found:
        assert tokens.quantile(0.95) < 1e-5
        assert tokens.max() < 0.05


@pytest.mark.parametrize("format", all_formats(), ids=str)
@pytest.mark.parametrize(
    ("experts", "max_staleness"), [(DENSE, OWN_BUFFERS), (MIXTURE, SHARED)], ids=["dense", "mixture"]
)
def test_an_aligned_learner_scores_what_was_sampled(format: Format, experts: int, max_staleness: int) -> None:
    assert_aligned(gaps_over_updates(as_written(format), experts=experts, max_staleness=max_staleness))


def test_so_it_does_whoever_owns_the_memory() -> None:
    assert_aligned(gaps_over_updates("w4a8", experts=DENSE, max_staleness=SHARED))
    assert_aligned(gaps_over_updates("w4a8", experts=MIXTURE, max_staleness=OWN_BUFFERS))


def test_so_it_does_after_several_updates_of_a_scaled_model() -> None:
    found = gaps_over_updates("w4a16", steps=3, mini_steps=2, update_scale=1.5, max_staleness=OWN_BUFFERS)
    assert_aligned(found)


@four_bits
@experts
def test_a_learner_in_high_precision_does_not(precision: str, experts: int) -> None:
    for tokens in gaps_over_updates(precision, experts=experts, alignment="none"):
        assert tokens.median() > 0.05


@memory
@experts
def test_the_engine_runs_the_learner_s_bytes(experts: int, max_staleness: int) -> None:
    """In one memory nothing is copied; otherwise the bytes are equal. Made once per matrix and update."""

    async def run() -> None:
        async with started(make_recipe("w4a16", experts=experts, max_staleness=max_staleness)) as roles:
            await take_step(roles)
            encoded, engine = low_bit_of(roles).encoded, engine_state(roles)
            assert engine_formats(roles) == {"w4a16", "float32"}
            for name, tensor in roles.core.published().items():
                assert torch.equal(engine[name], tensor)
                assert (engine[name].data_ptr() == tensor.data_ptr()) == (max_staleness == SHARED)
            for name, weight in encoded.items():
                assert same_bytes(W4A16().quantize(roles.core.weights()[name]), weight)
                assert engine[f"{name}.codes"].dtype == torch.uint8

    asyncio.run(run())


@memory
@pytest.mark.parametrize("mini_steps", [1, 2])
def test_nothing_is_quantized_twice(max_staleness: int, mini_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []

    def counted(self: W4A16, weight: Tensor, encode=W4A16.encode_weight) -> Encoded:
        made.append(weight)
        return encode(self, weight)

    monkeypatch.setattr(W4A16, "encode_weight", counted)

    async def run() -> None:
        async with started(make_recipe("w4a16", max_staleness=max_staleness, mini_steps=mini_steps)) as roles:
            made.clear()
            await take_step(roles)
            assert len(made) == mini_steps * len(low_bit_of(roles).layers), "once per matrix and update"
            await roles.learner.publish(7)
            await roles.engine.update_weights(7)
            await take_step(roles, approve=False)
            assert len(made) == mini_steps * len(low_bit_of(roles).layers)

    asyncio.run(run())


@pytest.mark.parametrize("mini_steps", [1, 2])
def test_changed_codes_are_counted_against_what_was_published(mini_steps: int) -> None:
    async def run() -> None:
        async with started(make_recipe("w4a16", mini_steps=mini_steps)) as roles:
            for approve, expected_change in ((True, True), (False, False), (True, True)):
                low_bit = low_bit_of(roles)
                before = {name: Encoded(e.codes.clone(), e.scales, e.shape) for name, e in low_bit.encoded.items()}
                metrics = await take_step(roles, approve=approve)
                num = sum(torch.Size(e.shape).numel() for e in before.values())
                differ = sum(
                    float(e.changed(before[name])) * torch.Size(e.shape).numel() for name, e in low_bit.encoded.items()
                )
                assert metrics["quant/changed"] == pytest.approx(differ / num)
                assert (metrics["quant/changed"] > 0) == expected_change
                assert metrics["quant/bits"] == 4
                assert {f"quant/changed/layer{i}" for i in (0, 1)} < metrics.keys()

    asyncio.run(run())


@experts
@pytest.mark.parametrize(("precision", "share"), [("w4a16", 0.27), ("w4a8", 0.27), ("int8_w8a8", 0.52)])
def test_bytes_of_a_sync(precision: str, share: float, experts: int) -> None:
    """Of what the matrices take in bfloat16: about a quarter with 4 bits, scales included, half with 8."""
    module = tiny_model(TinyModel(hidden=256, layers=1, experts=experts), seed=0)
    low_bit = LowBitWeights(module, Plugin(package=FORMATS, name=precision))
    published = sum(tensor.nbytes for tensor in low_bit.publish().values())
    weights = sum(module.get_parameter(layer.name).numel() for layer in low_bit.layers)
    assert share - 0.02 < published / (2 * weights) < share
