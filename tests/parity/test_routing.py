"""One seam for the routers of every mixture: what is recorded, replayed, is the very same function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    DbrxConfig,
    DbrxForCausalLM,
    JetMoeConfig,
    JetMoeForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
)

from engine_support import ask, engine_core, finish, prompt, small
from lockstep.config import ConfigError
from lockstep.data.chat import Conversation
from lockstep.data.packing import collate, row_of
from lockstep.learner.parallel import prepare
from lockstep.learner.ranks import Ranks
from lockstep.learner.scoring import score
from lockstep.models import varlen
from lockstep.models.head import install_head
from lockstep.models.routes import Replay
from lockstep.models.routing import Routers, decoder_layers, find_routers, install_routing
from lockstep.models.selfcheck import self_check
from lockstep.models.twins import use_attention
from lockstep.types import Batch, Completion, Request, Trajectory, Verdict
from mixtures import FAMILIES, Noting, deepseek_v2, gpt_oss, obeying, own_routes, qwen3, sets

TOKENS = torch.tensor([prompt(21, seed=5)])


@pytest.fixture(scope="module", params=[*FAMILIES, "gpt_oss"])
def family(request: pytest.FixtureRequest) -> PreTrainedModel:
    return (FAMILIES | {"gpt_oss": gpt_oss})[request.param]()


def logits(view: PreTrainedModel, noting: Noting | None) -> Tensor:
    with torch.inference_mode():
        return view(input_ids=TOKENS, use_cache=False, lockstep=noting).logits


def test_routes_replayed_are_bit_equal_and_other_experts_are_not(family: PreTrainedModel) -> None:
    view, routers = obeying(family)
    noting = Noting()
    live = logits(view, noting)
    assert torch.equal(live, logits(view, None))
    assert torch.equal(live, logits(view, Noting(told={n: ids.clone() for n, ids in noting.noted.items()})))
    assert noting.noted.keys() == set(range(routers.num_layers))
    read = Noting(decides=False)  # from the router's result, where it has them, in place of asking
    assert torch.equal(live, logits(view, read))
    assert all(torch.equal(read.noted[n], ids) for n, ids in noting.noted.items())
    for number, ids in noting.noted.items():  # in any single layer
        other = logits(view, Noting(told={number: (ids + 1) % routers.num_experts}))
        assert (other - live).abs().amax(-1).gt(1e-4).any()


def test_only_layers_with_experts_are_counted() -> None:
    routers = find_routers(qwen3())
    assert routers == Routers(
        layers=("model.layers.0", "model.layers.2"),
        modules=("model.layers.0.mlp.gate", "model.layers.2.mlp.gate"),
        num_experts=8,
        top_k=2,
        output=2,
    )
    assert find_routers(small()) is None


def test_looking_for_routers_leaves_the_model_as_it_was() -> None:
    module = qwen3()
    find_routers(module)
    assert not any("forward" in vars(child) for child in module.modules())


def phimoe() -> PreTrainedModel:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return PhimoeForCausalLM(PhimoeConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, num_local_experts=4))


def jetmoe() -> PreTrainedModel:
    """Its attention has experts too."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "kv_channels": 8}
    config = JetMoeConfig(**sizes, num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=1)
    return JetMoeForCausalLM(config)


def dbrx() -> PreTrainedModel:
    experts = {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}
    attention = {"kv_n_heads": 4, "rope_theta": 1e4, "clip_qkv": 8.0}
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 64}
    return DbrxForCausalLM(DbrxConfig(**sizes, attn_config=attention, ffn_config=experts))


def unknown() -> PreTrainedModel:
    """Whose experts go by another name."""
    module: Any = small()
    module.config.num_local_experts = 8
    return module


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (jetmoe, "JetMoeForCausalLM cannot be replayed: 6 choices of experts in a forward, of which 3 can be followed"),
        (dbrx, r"the experts of DbrxFFN are DbrxExperts, with mlp.w1 \[64, 32\] of 3 weights; supported are a list of"),
        (unknown, "its configuration has num_local_experts, but no layer has a part called experts"),
        (
            phimoe,
            "PhimoeForCausalLM cannot be replayed: PhimoeSparseMoeBlock chooses its experts with 0 calls of topk; supp",
        ),
        (
            lambda: deepseek_v2(topk_method="group_limited_greedy", n_group=2, topk_group=1),
            "DeepseekV2ForCausalLM cannot be replayed: its routers give no weight to experts that they would",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_name(build, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        find_routers(build())


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "mixtral", "deepseek_v3"])
def test_a_mixture_made_of_a_dense_model_can_be_replayed(name: str) -> None:
    """Its experts are all one and its routers prefer none: whoever is chosen, the logits are the same."""
    module = FAMILIES[name]()
    for key, parameter in module.named_parameters():
        if "mlp.experts." in key:
            parameter.data[:] = parameter.data[:1].clone()
        elif key.endswith("mlp.gate.weight"):
            parameter.data.zero_()
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    routers = find_routers(module)
    assert routers is not None
    assert routers.output is not None
    assert all(torch.equal(before[key], tensor) for key, tensor in module.state_dict().items())


def test_a_mixture_whose_layers_choose_differently_is_refused() -> None:
    module = qwen3()
    module.model.layers[2].mlp.gate.top_k = 3
    with pytest.raises(ConfigError, match=r"its layers choose differently: \[\(8, 2\), \(8, 3\)\]"):
        find_routers(module)


# The whole way: recorded by the engine while it samples, replayed by the learner.


def learner_of(module: PreTrainedModel, recompute: bool = False) -> Routers:
    """In place."""
    routers = find_routers(module)
    assert routers is not None
    use_attention(module, varlen.NAME)
    install_head(module)
    install_routing(module, routers)
    prepare(module, torch.float32, recompute, Ranks(torch.device("cpu")))
    return routers


def trajectory(request: Request, completion: Completion) -> Trajectory:
    conversation = Conversation()
    conversation.observe(request.tokens)
    conversation.sampled(completion)
    return conversation.trajectory(uid=request.uid, text="", verdict=Verdict(value=1.0), temperature=1.0)


def batch_of(request: Request, completion: Completion) -> Batch:
    return collate([row_of(trajectory(request, completion), 0)])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_learner_runs_the_experts_the_engine_ran(name: str) -> None:
    """Moved by noise, its routers would choose others; replayed, the sampler's log-probs come out all the same."""
    module, request = FAMILIES[name](), ask("r", prompt(17, seed=2), 20, temperature=1.0)
    self_check(module)
    done = finish(engine_core(module, record=True), [request])["r"]
    assert done.routes is not None
    assert done.routes.ids.dtype == (torch.int16 if "512" in name else torch.uint8)
    view, _ = obeying(module)
    assert torch.equal(sets(done.routes.ids), sets(own_routes(view, [*request.tokens, *done.tokens])[:-1]))
    routers, batch = learner_of(module), batch_of(request, done)
    scores = score(module, batch, routers)
    torch.testing.assert_close(scores.logp[batch.mask], torch.tensor(done.logp), atol=1e-4, rtol=0)
    assert scores.routed is not None
    differ = scores.routed.differ()
    assert differ is not None
    assert not differ.any()
    assert torch.equal(scores.routed.used()[:-1], done.routes.ids)


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "deepseek_v3"])
def test_recomputed_activations_replay_their_own_routes_whatever_runs_in_between(name: str) -> None:
    """Gradients of one batch, with another one's forward, and a live one, between its own and its backward."""
    requests = [ask(f"r{i}", prompt(17, seed=i), 12, temperature=1.0, seed=i) for i in range(2)]
    gradients = []
    for recompute in (False, True):
        module = FAMILIES[name]()
        done = finish(engine_core(module, record=True), requests)
        module.requires_grad_(True)
        routers, noise = learner_of(module, recompute), torch.Generator().manual_seed(0)
        first, second = (unlike(batch_of(r, done[r.uid]), routers, noise) for r in requests)
        loss = score(module, first, routers).logp.sum()
        score(module, second, routers)
        score(module, second, None)
        loss.backward()
        gradients.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
    held, recomputed = gradients
    assert any("gate" in name and gradient.abs().max() > 0 for name, gradient in held.items())
    for name, gradient in held.items():
        assert torch.equal(gradient, recomputed[name]), name


def unlike(batch: Batch, routers: Routers, generator: torch.Generator) -> Batch:
    """With experts that no router would have chosen."""
    scores = torch.rand(len(batch.tokens), routers.num_layers, routers.num_experts, generator=generator)
    return replace(batch, routes=scores.argsort(-1)[..., : routers.top_k].to(routers.dtype))


def test_shared_prefixes_are_replayed_too() -> None:
    module = qwen3()
    requests = [ask(f"r{i}", prompt(40, seed=2), 12, temperature=1.0, seed=i) for i in range(3)]
    done = finish(engine_core(module, record=True), requests)
    rows = [row_of(trajectory(request, done[request.uid]), 0) for request in requests]
    batch, routers = collate(rows), learner_of(module)
    assert batch.shared is not None
    assert (batch.shared == torch.arange(len(batch.tokens))).sum() == 40 + 3 * 12  # the prompt runs once
    scores = score(module, batch, routers)
    torch.testing.assert_close(scores.logp[batch.mask], batch.logp_behav[batch.mask], atol=1e-4, rtol=0)
    assert scores.routed is not None
    assert scores.routed.used().shape == (len(batch.tokens), 2, 2)
    assert rows[1].routes is not None
    rows[1].routes[5] = (rows[1].routes[5] + 1) % 8  # another way through the experts is another past
    shared = collate(rows).shared
    assert shared is None or (shared == torch.arange(len(batch.tokens))).sum() > 40 + 3 * 12


class Double(TorchFunctionMode):
    """Norms and routers compute in float32 whatever the model's dtype, which is too coarse for finite differences."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        args = [torch.float64 if a is torch.float32 else a for a in args]
        return func(*args, **{k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()})

    @classmethod
    def wrap(cls, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with cls():
                return forward(*args, **kwargs)

        return run


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "deepseek_v3", "mixtral"])
@pytest.mark.parametrize("recompute", [False, True], ids=["held", "recomputed"])
def test_router_gradients_match_finite_differences_through_the_replayed_rule(name: str, recompute: bool) -> None:
    """Also when another forward, with other routes, runs before the backward."""
    module = FAMILIES[name]()
    routers = find_routers(module)
    assert routers is not None
    module.double().set_experts_implementation("eager")
    for part in (*decoder_layers(module), module.model.norm):
        part.forward = Double.wrap(part.forward)
    install_routing(module, routers)
    module.requires_grad_(True)
    prepare(module, torch.float64, recompute, Ranks(torch.device("cpu")))
    generator = torch.Generator().manual_seed(1)
    size = (TOKENS.shape[1], routers.num_layers, routers.num_experts)
    ids, others = (torch.rand(size, generator=generator).argsort(-1)[..., : routers.top_k] for _ in range(2))

    def loss(ids: Tensor) -> Tensor:
        replay = Noting(told=dict(enumerate(ids.unbind(1))))
        out = module(input_ids=TOKENS, use_cache=False, lockstep=replay).logits
        return (out * torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)).mean()

    value = loss(ids)
    loss(others)
    value.backward()
    for router in (routers.modules[0], routers.modules[-1]):
        weight = module.get_submodule(router).weight
        assert isinstance(weight, Tensor)
        assert weight.grad is not None
        assert weight.grad.abs().max() > 1e-6
        direction = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        expected = slope(lambda: loss(ids), weight, direction)
        torch.testing.assert_close((weight.grad * direction).sum(), expected, rtol=1e-6, atol=1e-10)


@torch.no_grad()
def slope(loss: Callable[[], Tensor], weight: Tensor, direction: Tensor, step: float = 1e-4) -> Tensor:
    start, values = weight.clone(), []
    for sign in (1, -1):
        weight.copy_(start + sign * step * direction)
        values.append(loss())
    weight.copy_(start)
    return (values[0] - values[1]) / (2 * step)


def test_live_rows_choose_the_same_when_they_are_computed_again() -> None:
    """A row without a route keeps, in recomputation, what was chosen first: even if the scores have moved since."""
    module = qwen3()
    routers = find_routers(module)
    assert routers is not None
    known = torch.tensor([True, False])
    ids = torch.tensor([[[1, 2], [3, 4]], [[0, 0], [0, 0]]], dtype=torch.uint8)
    replay, live = Replay(routers, ids, known), torch.tensor([[5, 6], [7, 1]])
    assert replay.choose(0, live, live.float()).tolist() == [[1, 2], [7, 1]]
    assert replay.choose(1, live, live.float()).tolist() == [[3, 4], [7, 1]]
    assert replay.choose(0, live.flip(0), live.float()).tolist() == [[1, 2], [7, 1]]
    routed = replay.outcome(None)
    assert routed.used().tolist() == [[[1, 2], [3, 4]], [[7, 1], [7, 1]]]
    differ = routed.differ()
    assert differ is not None
    assert differ.tolist() == [[True, True], [False, False]]


def test_a_forward_that_passes_over_a_router_is_refused() -> None:
    module = qwen3()
    routers = learner_of(module)
    del module.get_submodule(routers.modules[1]).forward  # as if something had put its own in that place
    plain = ask("r", prompt(9, seed=2), 4)
    done = finish(engine_core(qwen3(), record=True), [plain])["r"]
    with pytest.raises(RuntimeError, match="1 of 2 routers were asked in this forward"):
        score(module, batch_of(plain, done), routers)
