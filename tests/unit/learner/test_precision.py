"""Small updates survive, gradients add up in float32, an overflow leaves no trace, a resume is bit-equal."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep.config import Plugin
from lockstep.learner.optimisers import build_optimiser
from lockstep.learner.precision import MAX_NONFINITE, LossScale, MasterWeights, Skip

LOW_PRECISION = [torch.bfloat16, torch.float16]
ALL_PRECISIONS = [torch.float32, *LOW_PRECISION]


class Tied(nn.Module):
    """An embedding that is its own output head, with a layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(7, 4)
        self.proj = nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 7, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.proj(self.embed_tokens(tokens))).float().log_softmax(-1)


def tied(dtype: torch.dtype) -> Tied:
    torch.manual_seed(0)
    return Tied().to(dtype)


def loss_of(module: nn.Module, seed: int) -> Tensor:
    tokens = torch.randint(7, (5,), generator=torch.Generator().manual_seed(seed))
    return nn.functional.nll_loss(module(tokens), tokens.roll(1), reduction="sum")


def muon_of(masters: MasterWeights) -> torch.optim.Optimizer:
    plugin = Plugin(package="lockstep.learner.optimisers", name="muon")
    return build_optimiser(plugin, masters.named_parameters(), 1e-2, 0.1)


def snapshot(module: nn.Module, masters: MasterWeights, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every number an update may change, under one name each."""
    slots = {f"{i}.{k}": v for i, state in optimiser.state_dict()["state"].items() for k, v in state.items()}
    return copy.deepcopy({**module.state_dict(), **slots, **{f"master.{k}": v for k, v in masters.named_parameters()}})


def assert_bit_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


def test_masters_keep_updates_that_bfloat16_swallows() -> None:
    module = nn.Linear(4, 4, bias=False).bfloat16()
    nn.init.constant_(module.weight, 0.1)
    control = copy.deepcopy(module)
    masters = MasterWeights(module, torch.bfloat16)
    optimiser = torch.optim.SGD([p for _, p in masters.named_parameters()], lr=1e-6)
    control_optimiser = torch.optim.SGD(control.parameters(), lr=1e-6)
    start = module.weight.detach().clone()
    for _ in range(1000):
        module.weight.sum().backward()
        masters.step(optimiser)
        control_optimiser.zero_grad()
        control.weight.sum().backward()
        control_optimiser.step()
    assert torch.equal(control.weight, start)
    torch.testing.assert_close(dict(masters.named_parameters())["weight"], start.float() - 1e-3, atol=1e-5, rtol=0)
    assert (start - module.weight).min() >= 2**-11  # two units in the last place of a bfloat16 near 0.1


def test_float32_parameters_are_their_own_masters() -> None:
    module = tied(torch.float32)
    masters = dict(MasterWeights(module, torch.float32).named_parameters())
    assert all(masters[name] is parameter for name, parameter in module.named_parameters())


def test_only_the_low_precision_part_of_a_mixed_module_is_copied() -> None:
    module = tied(torch.bfloat16)
    module.proj.float()
    masters = dict(MasterWeights(module, torch.bfloat16).named_parameters())
    assert masters["proj.weight"] is module.proj.weight
    assert masters["embed_tokens.weight"].dtype == torch.float32
    assert masters["embed_tokens.weight"] is not module.embed_tokens.weight


@pytest.mark.parametrize("dtype", ALL_PRECISIONS, ids=str)
def test_accumulated_gradient_is_the_float32_sum_over_micro_batches(dtype: torch.dtype) -> None:
    module, reference = tied(dtype), tied(dtype)
    masters = MasterWeights(module, dtype)
    total = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in reference.named_parameters()}
    for seed in range(4):
        masters.scale(loss_of(module, seed)).backward()
        reference.zero_grad()
        (loss_of(reference, seed) * masters.loss_scale).backward()
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None
            total[name] += parameter.grad.float()
    for name, master in masters.named_parameters():
        assert master.grad is not None
        assert torch.equal(master.grad, total[name])


def test_low_precision_gradients_do_not_linger_in_the_module() -> None:
    module = tied(torch.bfloat16)
    masters = MasterWeights(module, torch.bfloat16)
    masters.scale(loss_of(module, 0)).backward()
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("max_norm", [None, 0.1, 1e6])
def test_the_sum_is_divided_once_then_clipped(max_norm: float | None) -> None:
    module, reference = tied(torch.float32), tied(torch.float32)
    masters = MasterWeights(module, torch.float32)
    for seed in range(2):
        masters.scale(loss_of(module, seed)).backward()
    outcome = masters.step(torch.optim.SGD(module.parameters(), lr=1.0), max_norm=max_norm, denominator=10)
    ((loss_of(reference, 0) + loss_of(reference, 1)) / 10).backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), max_norm or math.inf)
    torch.optim.SGD(reference.parameters(), lr=1.0).step()
    assert outcome.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_the_loss_scale_does_not_show_in_the_update() -> None:
    half, full = tied(torch.float16), tied(torch.float32)
    for module, dtype in ((half, torch.float16), (full, torch.float32)):
        masters = MasterWeights(module, dtype)
        masters.scale(loss_of(module, 0)).backward()
        outcome = masters.step(torch.optim.SGD([p for _, p in masters.named_parameters()], lr=0.1), denominator=5)
        assert 0.1 < outcome.grad_norm < 10
    for a, b in zip(half.parameters(), full.parameters(), strict=True):
        torch.testing.assert_close(a.float(), b, atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "spoil", "halved"),
    [
        pytest.param(torch.float16, 1e8, True, id="float16-overflow"),
        pytest.param(torch.float16, math.nan, True, id="float16-nan"),
        pytest.param(torch.float16, 0.0, False, id="float16-zero"),
        pytest.param(torch.bfloat16, math.nan, False, id="bfloat16-nan"),
        pytest.param(torch.float32, math.inf, False, id="float32-inf"),
        pytest.param(torch.float32, 0.0, False, id="float32-zero"),
    ],
)
def test_a_skipped_update_leaves_no_trace(dtype: torch.dtype, spoil: float, halved: bool) -> None:
    module = tied(dtype)
    masters = MasterWeights(module, dtype)
    optimiser = muon_of(masters)
    masters.scale(loss_of(module, 0)).backward()
    assert not masters.step(optimiser).skipped
    before, scale = snapshot(module, masters, optimiser), masters.loss_scale

    masters.scale(loss_of(module, 1) * spoil).backward()
    outcome = masters.step(optimiser, max_norm=1.0)
    assert outcome.skipped is (Skip.NONFINITE if spoil else Skip.EMPTY)
    assert_bit_equal(snapshot(module, masters, optimiser), before)
    assert masters.loss_scale == (scale / 2 if halved else scale)

    masters.scale(loss_of(module, 2)).backward()  # the spoilt gradient is gone
    assert not masters.step(optimiser).skipped


def test_an_update_without_any_gradient_is_skipped() -> None:
    module = tied(torch.bfloat16)
    masters = MasterWeights(module, torch.bfloat16)
    outcome = masters.step(muon_of(masters), denominator=0)
    assert outcome.skipped is Skip.EMPTY
    assert outcome.grad_norm == 0


def test_a_gradient_over_nothing_is_refused() -> None:
    module = tied(torch.float32)
    masters = MasterWeights(module, torch.float32)
    loss_of(module, 0).backward()
    with pytest.raises(ValueError, match="cannot be divided by 0"):
        masters.step(muon_of(masters), denominator=0)


@pytest.mark.parametrize("dtype", ALL_PRECISIONS, ids=str)
def test_parameters_nobody_used_and_frozen_ones_stay(dtype: torch.dtype) -> None:
    module = tied(dtype)
    module.proj.bias.requires_grad_(False)
    masters = MasterWeights(module, dtype)
    before = copy.deepcopy(module.state_dict())
    masters.scale(module.embed_tokens(torch.tensor([1, 2])).float().square().sum()).backward()
    assert not masters.step(muon_of(masters)).skipped
    assert "proj.bias" not in dict(masters.named_parameters())
    assert torch.equal(module.proj.weight, before["proj.weight"])
    assert not torch.equal(module.embed_tokens.weight, before["embed_tokens.weight"])


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_tied_weights_have_one_master_and_stay_tied_in_place(dtype: torch.dtype) -> None:
    module = tied(dtype)
    storage = module.lm_head.weight.data_ptr()
    masters = MasterWeights(module, dtype)
    assert [name for name, _ in masters.named_parameters()] == ["embed_tokens.weight", "proj.weight", "proj.bias"]
    masters.scale(loss_of(module, 0)).backward()
    masters.step(muon_of(masters))
    assert module.lm_head.weight.data_ptr() == module.embed_tokens.weight.data_ptr() == storage
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, dict(masters.named_parameters())[name].to(dtype))


@pytest.mark.parametrize("dtype", ALL_PRECISIONS, ids=str)
def test_a_resumed_run_is_bit_equal(dtype: torch.dtype) -> None:
    module, resumed = tied(dtype), Tied().to(dtype)
    masters = MasterWeights(module, dtype)
    optimiser = muon_of(masters)

    def train(module: nn.Module, masters: MasterWeights, optimiser: torch.optim.Optimizer, start: int) -> None:
        for seed in range(start, start + 3):
            masters.scale(loss_of(module, seed) * (1e8 if seed == 1 else 1)).backward()
            masters.step(optimiser, max_norm=1.0, denominator=5)

    train(module, masters, optimiser, start=0)
    state = copy.deepcopy((masters.state_dict(), optimiser.state_dict()))
    resumed_masters = MasterWeights(resumed, dtype)
    resumed_masters.load_state_dict(state[0])
    resumed_optimiser = muon_of(resumed_masters)
    resumed_optimiser.load_state_dict(state[1])
    train(module, masters, optimiser, start=3)
    train(resumed, resumed_masters, resumed_optimiser, start=3)
    assert masters.loss_scale == resumed_masters.loss_scale
    assert_bit_equal(snapshot(module, masters, optimiser), snapshot(resumed, resumed_masters, resumed_optimiser))


def test_weights_of_another_model_are_told_apart_by_name_and_shape() -> None:
    saved = MasterWeights(tied(torch.bfloat16), torch.bfloat16).state_dict()["weights"]
    assert MasterWeights(tied(torch.float32), torch.float32).misfits(saved) == []
    other = tied(torch.float32)
    other.proj, other.norm = nn.Linear(4, 5), nn.LayerNorm(4, bias=False)
    del saved["proj.bias"]
    assert MasterWeights(other, torch.float32).misfits(saved | {"value.weight": torch.zeros(1)}) == [
        "it lacks proj.bias",
        "it lacks norm.weight",
        "its value.weight has no place in the model",
        "its proj.weight is [4, 4], the model's is [5, 4]",
    ]


@given(st.lists(st.booleans(), max_size=60))
def test_the_loss_scale_halves_on_overflow_and_doubles_after_patience(overflows: list[bool]) -> None:
    scale, expected, clean = LossScale(value=2.0**40, patience=3), 2.0**40, 0
    for overflowed in overflows:
        scale.update(overflowed=overflowed)
        clean = 0 if overflowed else clean + 1
        expected *= 0.5 if overflowed else 2.0 if clean % 3 == 0 else 1.0
        assert scale.value == expected


def test_gradients_that_never_become_finite_stop_the_run() -> None:
    scale = LossScale(value=2.0**-24)
    with pytest.raises(FloatingPointError, match="inf or NaN"):
        scale.update(overflowed=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_gradients_that_are_not_finite_stops_the_run_and_a_single_one_does_not(dtype: torch.dtype) -> None:
    module = tied(dtype)
    masters = MasterWeights(module, dtype)
    optimiser = muon_of(masters)

    def update(factor: float) -> Skip | None:
        masters.scale(loss_of(module, 0) * factor).backward()
        return masters.step(optimiser).skipped

    for _ in range(MAX_NONFINITE - 1):
        assert update(math.nan) is Skip.NONFINITE
    assert update(1.0) is None
    for _ in range(MAX_NONFINITE - 1):
        assert update(math.inf) is Skip.NONFINITE
        assert update(0.0) is Skip.EMPTY  # says nothing about the weights, so it does not start the count again
    with pytest.raises(FloatingPointError, match=f"{MAX_NONFINITE} updates in a row"):
        update(math.nan)


def test_float16_may_overflow_as_often_as_its_loss_scale_can_be_halved() -> None:
    module = tied(torch.float16)
    masters = MasterWeights(module, torch.float16)
    optimiser = muon_of(masters)

    def overflow() -> Skip | None:
        masters.scale(loss_of(module, 0) * math.nan).backward()
        return masters.step(optimiser).skipped

    assert [overflow() for _ in range(32)] == [Skip.NONFINITE] * 32  # from 2^8 to 2^-24
    with pytest.raises(FloatingPointError, match="loss scale"):
        overflow()
