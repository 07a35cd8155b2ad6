"""Muon against the SVD, against torch's own, over experts and over ranks; who decays; state that survives a resume."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from lockstep.config import Plugin, choices
from lockstep.learner.optimisers import build_optimiser, set_learning_rate
from lockstep.learner.optimisers._grouping import decays, is_hidden_matrix
from lockstep.learner.optimisers.muon import Muon, orthogonalise
from lockstep.learner.precision import MasterWeights
from lockstep.learner.schedule import Schedule

PACKAGE = "lockstep.learner.optimisers"
LEARNING_RATE, WEIGHT_DECAY = 1e-2, 0.1


class Experts(nn.Module):
    """Three fused experts; the last never sees a token."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(3, 7, 6) / 3)
        self.down_proj = nn.Parameter(torch.randn(3, 6, 7) / 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("eoi,ni->neo", self.up_proj[:2], x).tanh()
        return x + torch.einsum("eio,neo->ni", self.down_proj[:2], hidden)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 6)
        self.mixer = nn.Linear(6, 6)
        self.experts = Experts()
        self.norm = nn.LayerNorm(6)
        self.lm_head = nn.Linear(6, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.experts(self.mixer(self.embed_tokens(tokens)))
        return self.lm_head(self.norm(hidden)).log_softmax(-1)


def tiny() -> Tiny:
    torch.manual_seed(0)
    return Tiny()


def optimiser_of(name: str, module: nn.Module, **options: float) -> torch.optim.Optimizer:
    plugin = Plugin(package=PACKAGE, name=name, options=options)
    return build_optimiser(plugin, module.named_parameters(), LEARNING_RATE, WEIGHT_DECAY)


def update(module: nn.Module, optimiser: torch.optim.Optimizer, seed: int) -> None:
    tokens = torch.randint(11, (8,), generator=torch.Generator().manual_seed(seed))
    optimiser.zero_grad()
    nn.functional.nll_loss(module(tokens), tokens.roll(1)).backward()
    optimiser.step()


@pytest.mark.parametrize("shape", [(4, 24, 16), (4, 16, 24)])
def test_orthogonalisation_keeps_singular_vectors_and_flattens_singular_values(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    U, _, Vh = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    S = torch.logspace(0, -2, 16).expand(4, 16)
    core = U.mT @ orthogonalise(U * S[:, None] @ Vh) @ Vh.mT  # diagonal if the singular vectors are kept
    flattened = core.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(core, torch.diag_embed(flattened), atol=1e-4, rtol=0)
    assert flattened.min() > 0.65
    assert flattened.max() < 1.21


def test_orthogonalising_zero_gives_zero() -> None:
    assert orthogonalise(torch.zeros(2, 3, 4)).abs().max() == 0


def test_the_update_has_the_size_of_an_adamw_update() -> None:
    weight = nn.Parameter(torch.zeros(64, 32))
    weight.grad = torch.randn(64, 32, generator=torch.Generator().manual_seed(2))
    Muon()([("proj.weight", weight)], 1.0, 0.0).step()
    assert weight.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.25)  # singular values average below 1


def test_two_dimensional_updates_are_those_of_torch_muon() -> None:
    ours = nn.Parameter(torch.randn(20, 12, generator=torch.Generator().manual_seed(3)))
    theirs = nn.Parameter(ours.detach().clone())
    reference = torch.optim.Muon([theirs], lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
    optimiser = Muon()([("proj.weight", ours)], LEARNING_RATE, WEIGHT_DECAY)
    for seed in range(3):
        ours.grad = torch.randn(20, 12, generator=torch.Generator().manual_seed(seed))
        theirs.grad = ours.grad.clone()
        optimiser.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, atol=3e-4, rtol=0)  # torch iterates in bfloat16; 3 updates move by 6e-3


def test_fused_experts_move_as_separate_ones_and_unused_ones_not_at_all() -> None:
    generator = torch.Generator().manual_seed(4)
    fused = nn.Parameter(torch.randn(3, 6, 5, generator=generator))
    separate = [nn.Parameter(expert.clone()) for expert in fused.detach()]
    fused_muon = Muon()([("experts.down_proj", fused)], LEARNING_RATE, WEIGHT_DECAY)
    separate_muon = Muon()([(f"experts.{i}.weight", p) for i, p in enumerate(separate)], LEARNING_RATE, WEIGHT_DECAY)
    for used in ([1, 1, 0], [1, 0, 1], [0, 1, 1]):
        fused.grad = torch.randn(3, 6, 5, generator=generator) * torch.tensor(used)[:, None, None]
        before = fused.detach().clone()
        for parameter, gradient, is_used in zip(separate, fused.grad, used, strict=True):
            parameter.grad = gradient.clone() if is_used else None
        fused_muon.step()
        separate_muon.step()
        assert [not torch.equal(a, b) for a, b in zip(fused, before, strict=True)] == [bool(u) for u in used]
    torch.testing.assert_close(fused, torch.stack(list(separate)), atol=1e-7, rtol=1e-5)


def test_what_is_no_hidden_matrix_moves_as_under_adamw() -> None:
    left, right = tiny(), tiny()
    muon, adamw = optimiser_of("muon", left), optimiser_of("adamw", right)
    update(left, muon, seed=0)
    update(right, adamw, seed=0)
    for (name, a), (_, b) in zip(left.named_parameters(), right.named_parameters(), strict=True):
        assert torch.equal(a, b) != is_hidden_matrix(name, a), name


@pytest.mark.parametrize(
    ("name", "shape", "hidden", "decayed"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (8, 4), True, True),
        ("model.layers.0.mlp.gate_proj.weight", (8, 4), True, True),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 16, 8), True, True),
        ("model.layers.0.mlp.experts.gate_up_proj", (1, 16, 8), True, True),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (4, 16), False, False),
        ("model.layers.0.mlp.gate.weight", (4, 8), False, True),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 8), False, True),
        ("model.layers.0.input_layernorm.weight", (8,), False, False),
        ("model.layers.0.self_attn.q_proj.bias", (8,), False, False),
        ("model.embed_tokens.weight", (32, 8), False, False),
        ("transformer.wte.weight", (32, 8), False, False),
        ("lm_head.weight", (32, 8), False, True),
        ("value_head.weight", (2, 8), False, True),
        ("audio.conv1.weight", (8, 4, 3), False, True),
    ],
)
def test_names_and_shapes_decide_the_treatment(name: str, shape: tuple[int, ...], hidden: bool, decayed: bool) -> None:
    parameter = torch.empty(shape)
    assert is_hidden_matrix(name, parameter) == hidden
    assert decays(name, parameter) == decayed


@pytest.mark.parametrize("name", choices(PACKAGE))
def test_decay_spares_norms_biases_and_embeddings(name: str) -> None:
    module = tiny()
    decayed = {id(p) for g in optimiser_of(name, module).param_groups if g["weight_decay"] for p in g["params"]}
    names = {n for n, p in module.named_parameters() if id(p) in decayed}
    assert names == {"mixer.weight", "experts.up_proj", "experts.down_proj", "lm_head.weight"}


@pytest.mark.parametrize("name", choices(PACKAGE))
def test_a_resumed_run_is_bit_equal(name: str, tmp_path: Path) -> None:
    module = tiny()
    optimiser = optimiser_of(name, module)
    for seed in range(3):
        update(module, optimiser, seed)
    torch.save(optimiser.state_dict(), tmp_path / "state.pt")
    resumed = copy.deepcopy(module)
    resumed_optimiser = optimiser_of(name, resumed)
    resumed_optimiser.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for seed in range(3, 6):
        update(module, optimiser, seed)
        update(resumed, resumed_optimiser, seed)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("name", choices(PACKAGE))
def test_parameters_without_gradient_are_left_alone(name: str) -> None:
    module = tiny()
    before = copy.deepcopy(module.state_dict())
    optimiser = optimiser_of(name, module)
    module.norm(torch.randn(2, 6)).square().sum().backward()
    optimiser.step()
    moved = {key for key, value in module.state_dict().items() if not torch.equal(value, before[key])}
    assert moved == {"norm.weight", "norm.bias"}


@pytest.mark.parametrize("name", choices(PACKAGE))
def test_the_learning_rate_reaches_every_group(name: str) -> None:
    module = tiny()
    optimiser = optimiser_of(name, module)
    set_learning_rate(optimiser, 0.0)
    before = copy.deepcopy(module.state_dict())
    update(module, optimiser, seed=0)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def _placement(parameter: nn.Parameter) -> Shard:
    return Shard(1) if parameter.shape == (3, 6, 7) else Shard(0)  # down_proj: shards that cut through experts


def _train(module: nn.Module, name: str, rank: int, num_ranks: int) -> dict[str, Tensor]:
    masters = MasterWeights(module, torch.float32)
    plugin = Plugin(package=PACKAGE, name=name)
    optimiser = build_optimiser(plugin, masters.named_parameters(), LEARNING_RATE, WEIGHT_DECAY)
    for seed in range(3):
        tokens = torch.randint(11, (8,), generator=torch.Generator().manual_seed(seed)).chunk(num_ranks)[rank]
        loss = nn.functional.nll_loss(module(tokens), (tokens + 1) % 11, reduction="sum")
        masters.scale(loss).backward()
        masters.step(optimiser, max_norm=0.5, denominator=8 / num_ranks)
    values = {key: value.detach() for key, value in module.named_parameters()}
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in values.items()}


def _train_sharded(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    for name in ("muon", "adamw"):
        module = tiny()
        fully_shard(module, shard_placement_fn=_placement)
        result = _train(module, name, rank, num_ranks=2)
        if rank == 0:
            torch.save(result, f"{folder}/{name}.pt")
    dist.barrier()
    os._exit(0)  # torch now and then aborts while the interpreter takes a process group apart


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_train_sharded, (str(tmp_path),), nprocs=2)
    for name in ("muon", "adamw"):
        sharded, whole = torch.load(tmp_path / f"{name}.pt"), _train(tiny(), name, rank=0, num_ranks=1)
        for key, value in whole.items():
            torch.testing.assert_close(sharded[key], value, atol=2e-6, rtol=1e-5, msg=lambda m, k=key: f"{k}: {m}")


def test_schedules_rise_then_decay_to_the_floor() -> None:
    linear = [Schedule(kind="linear", warmup=2, floor=0.5).factor(u, 6) for u in range(8)]
    assert linear == pytest.approx([0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.5])
    cosine = [Schedule(kind="cosine").factor(u, 4) for u in range(5)]
    assert cosine == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)
    assert [Schedule(warmup=4).factor(u, 4) for u in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
