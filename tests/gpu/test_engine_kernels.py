"""The engine's kernels against what they replace, and the whole engine, in bursts, against plain transformers.

On a GPU; or anywhere with triton installed and TRITON_INTERPRET=1, in float32.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from engine_support import ask, engine_core, finish, prompt, rescore, sharpen
from kernel_support import DEVICE, DTYPES, ERROR, MARKS
from lockstep.models.fused import _experts
from lockstep.models.tiny import byte_tokenizer
from lockstep.rollout import burst, burst_state
from lockstep.rollout.burst import Burst
from lockstep.rollout.burst_state import State
from lockstep.rollout.sampler import SamplingBatch, sample
from lockstep.rollout.scheduler import Plan, Scheduler
from lockstep.rollout.sharing import pays

pytestmark = MARKS
PAGE = 16
COMMON = {
    "vocab_size": 261,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 260,
    "pad_token_id": 256,
}


def test_bursts_that_share_pages_score_as_in_a_full_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = sharpen(model("qwen3"), std=0.15)
    core = engine_core(copy.deepcopy(module).to(DEVICE), end=(7,), max_seqs=12)
    sharing = []
    monkeypatch.setattr(burst, "pays", lambda groups, pages: sharing.append(pays(groups, pages)) or sharing[-1])
    requests = [ask(f"{p}-{i}", prompt(60, p), 20, temperature=1.0, seed=i) for p in range(3) for i in range(5)]
    done = finish(core, requests)
    assert any(sharing)
    worst = max(float((torch.tensor(done[r.uid].logp) - rescore(module, r, done[r.uid])).abs().max()) for r in requests)
    assert worst < 1e-4


def test_one_that_has_ended_lends_its_pages_to_the_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of a group ends early and idles, and the others still read the prompt from its pages."""
    torch.manual_seed(0)
    module = sharpen(model("qwen3"), std=0.15)
    core = engine_core(copy.deepcopy(module).to(DEVICE), max_seqs=4)
    core.scheduler.idle_share = 1.0
    sharing = []
    monkeypatch.setattr(burst, "pays", lambda groups, pages: sharing.append(groups[0].members) or True)
    limits = (3, 12, 12)
    requests = [ask(f"{i}", prompt(40, 0), limit, temperature=1.0, seed=i) for i, limit in enumerate(limits)]
    done = finish(core, requests)
    assert sharing[0] == len(limits)
    for request in requests:
        expected = rescore(module, request, done[request.uid])
        assert float((torch.tensor(done[request.uid].logp) - expected).abs().max()) < 1e-4


def test_bursts_that_follow_each_other_draw_what_single_steps_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """One ends by its limit, one by an end token, one by what only the host knows: a stop string. That one must not go
    on writing: its further pages would be the first of the pool, which belongs to the longest."""
    torch.manual_seed(0)
    module = sharpen(model("qwen3"), std=0.15)
    requests = [ask(f"{i}", prompt(10, i), 7 if i == 1 else 40, temperature=1.0, seed=i) for i in range(4)]
    single = finish(engine_core(copy.deepcopy(module).to(DEVICE), max_seqs=4, compile=False), requests)
    text = byte_tokenizer().decode(single["3"].tokens[4:6])
    requests[3] = ask("3", prompt(10, 3), 40, temperature=1.0, seed=3, stop=(text,))
    end = single["2"].tokens[9]
    single = finish(engine_core(copy.deepcopy(module).to(DEVICE), end=(end,), max_seqs=4, compile=False), requests)
    core = engine_core(copy.deepcopy(module).to(DEVICE), end=(end,), max_seqs=4)
    core.scheduler.run_ahead, core.scheduler.follow_from, core.scheduler.idle_share = 3, 1, 1.0
    gone, follow = list[str](), Scheduler.follow  # ended sequences in bursts that go on for the others

    def watched(self: Scheduler, plan: Plan) -> Plan | None:
        following = follow(self, plan)
        gone.extend(c.seq.request.uid for c in (following.decode if following else ()) if c.seq.row < 0)
        return following

    monkeypatch.setattr(Scheduler, "follow", watched)
    done = finish(core, requests)
    assert "3" in gone
    for uid, expected in single.items():
        assert done[uid].tokens == expected.tokens
        assert done[uid].stop_reason == expected.stop_reason
        torch.testing.assert_close(torch.tensor(done[uid].logp), torch.tensor(expected.logp), atol=1e-4, rtol=0)


def test_rows_of_a_burst_are_looked_up() -> None:
    """One idles because it has drawn its last, and padding because it has nothing to draw."""
    from lockstep.rollout import burst_kernels

    torch.manual_seed(5)
    table, ints = (torch.randint(1, 99, shape, device=DEVICE) for shape in ((6, 600), (3, 6)))
    rows, positions, last = torch.tensor([[3, 0, 4, 5], [17, 9_000, 40, 0], [18, 9_001, 40, 0]], device=DEVICE)
    given = State(rows, rows, positions, last, rows), table, ints, torch.rand(3, 6, device=DEVICE), PAGE, 1234
    found, expected = burst_kernels.look_up(*given), burst_state.look_up(*given)
    assert expected.start.tolist() == [17, 9_000, 0, 0]
    assert expected.slots.tolist()[2:] == [1234, 1234]
    held = torch.arange(600, device=DEVICE) <= (positions // PAGE)[:, None]
    for ours, theirs in zip(found, expected._replace(pages=expected.pages * held), strict=True):
        assert torch.equal(ours, theirs)


def test_rows_of_a_burst_move_on() -> None:
    """At random: some have drawn their last, some draw an end token."""
    from lockstep.rollout import burst_kernels

    torch.manual_seed(6)
    size, state = 200, torch.randint(0, 12, (5, 256), device=DEVICE)
    drawn, ends = torch.randint(0, 12, (size,), device=DEVICE), torch.tensor([3, 7, 9], device=DEVICE)
    logp, results = torch.randn(size, device=DEVICE), list[tuple[Tensor, ...]]()
    for move_on in (burst_kernels.move_on, burst_state.move_on):
        moved, logps = state.clone(), torch.zeros(16, 256, device=DEVICE)
        tokens = torch.zeros(16, 256, dtype=torch.int64, device=DEVICE)
        move_on(State(*moved[:, :size]), drawn, logp, ends, tokens, logps)
        results.append((moved, tokens, logps))
    assert not torch.equal(results[0][0], state)
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_angles_are_those_of_transformers(dtype: torch.dtype, kind: str) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    from lockstep.models.fused import _rotary

    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e6}
    if kind != "default":
        parameters["factor"] = 4.0
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    module = Qwen3RotaryEmbedding(Qwen3Config(**COMMON, head_dim=32, rope_parameters=parameters)).to(DEVICE)
    places, x = torch.tensor([[0, 1, 77, 5000, 40_000]], device=DEVICE), torch.empty(1, device=DEVICE, dtype=dtype)
    for ours, theirs in zip(_rotary(module, x, places), module(x, places), strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, atol=ERROR[dtype] / 4, rtol=0)


@pytest.mark.parametrize("vocab", [50, 4096, 4097, 9000])
def test_draws_are_those_of_the_reference(vocab: int) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(64, vocab, generator=generator) * 3
    logits[3, ::2] = -torch.inf
    batch = SamplingBatch(
        temperature=torch.rand(64, generator=generator) + 0.5,
        greedy=torch.arange(64) == 5,
        top_k=torch.full((64,), vocab),
        top_p=torch.ones(64),
        min_p=torch.zeros(64),
        seed=torch.randint(-(2**63), 2**63 - 1, (64,), generator=generator),
        position=torch.arange(64) * 7,
        any_greedy=True,
        any_truncated=False,
    )
    moved = SamplingBatch(**{k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in fields(batch).items()})
    tokens, logp = sample(logits.to(DEVICE), moved)
    reference = (logits / batch.temperature[:, None]).log_softmax(-1)
    from lockstep.rollout.sampler import uniform

    cdf = reference.exp().double().cumsum(-1)
    expected = torch.searchsorted(cdf, (uniform(batch.seed, batch.position) * cdf[:, -1])[:, None], right=True)[:, 0]
    expected[5] = logits[5].argmax()
    assert torch.equal(tokens.cpu(), expected)
    torch.testing.assert_close(logp.cpu(), reference.gather(1, expected[:, None])[:, 0], atol=1e-5, rtol=0)
    logits[:, vocab // 2] = torch.nan
    tokens, logp = sample(logits.to(DEVICE), moved)
    assert logp.isnan().all()
    assert ((tokens >= 0) & (tokens < vocab)).all()


def test_rows_that_lie_by_expert_are_combined_by_token() -> None:
    from lockstep.models.kernels import experts

    torch.manual_seed(0)
    ids = torch.stack([torch.randperm(8)[:2] for _ in range(30)]).to(DEVICE)
    y, weights = torch.randn(60, 48, device=DEVICE), torch.rand(30, 2, device=DEVICE)
    order, _ = experts.group(ids, 8)
    assert torch.equal(ids.flatten()[order.long()], ids.flatten().sort()[0])
    expected = (y.view(30, 2, 48) * weights[:, :, None]).sum(1)
    torch.testing.assert_close(experts.combine(y, weights), expected, atol=1e-6, rtol=0)
    assert torch.equal(experts.combine(y[order.long()], weights, order), experts.combine(y, weights))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="Triton's interpreter rounds to bfloat16 otherwise")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_experts_compute_is_rounded_before_it_is_added(dtype: torch.dtype) -> None:
    from lockstep.models.kernels import experts

    torch.manual_seed(0)
    y, weights = torch.randn(600, 512, device=DEVICE).bfloat16(), torch.rand(300, 2, device=DEVICE).to(dtype)
    expected = (y * weights.reshape(-1, 1)).view(300, 2, 512).sum(1).bfloat16()
    assert torch.equal(experts.combine(y, weights), expected)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="the library's grouped product")
def test_experts_with_many_rows_compute_what_those_with_few_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.models.kernels import experts

    module: Any = model("qwen3_moe").to(DEVICE, torch.bfloat16)
    part = module.model.layers[0].mlp.experts
    hidden = torch.randn(100, 64, device=DEVICE, dtype=torch.bfloat16)
    ids = torch.stack([torch.randperm(8)[:2] for _ in range(100)]).to(DEVICE)
    weights = torch.rand(100, 2, device=DEVICE, dtype=torch.bfloat16)
    few = _experts(part, hidden, ids, weights)
    monkeypatch.setattr(experts, "MOST_ROWS", 1)
    many = _experts(part, hidden, ids, weights)
    assert few.abs().max() > 0
    torch.testing.assert_close(many, few, atol=1e-5, rtol=2e-2)


def fields(batch: SamplingBatch) -> dict[str, object]:
    return {name: getattr(batch, name) for name in SamplingBatch.__slots__}


def model(name: str) -> PreTrainedModel:
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**COMMON))
    if name == "qwen2":  # biases
        return Qwen2ForCausalLM(Qwen2Config(**COMMON))
    if name == "qwen3":  # head norms
        return Qwen3ForCausalLM(Qwen3Config(**COMMON, head_dim=16))
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**COMMON, **moe, head_dim=16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_answers_in_bursts_score_as_in_a_full_forward(name: str, dtype: torch.dtype) -> None:
    """More requests than rows, prompts of any length, greedy, random and truncated draws, an end token."""
    torch.manual_seed(0)
    module = sharpen(model(name), std=0.08 if dtype == torch.bfloat16 else 0.15)
    core = engine_core(copy.deepcopy(module).to(DEVICE, dtype), end=(7,), max_seqs=6, record=name == "qwen3_moe")
    assert isinstance(core.runner.burst, Burst)
    requests = [
        ask(f"{i}", prompt(9 + 3 * i, seed=i), 25 + i, temperature=float(i % 2), seed=i, top_p=0.9 if i == 2 else 1.0)
        for i in range(9)
    ]
    done = finish(core, requests)
    scored = [r for r in requests if r.params.top_p == 1]
    worst = max(float((torch.tensor(done[r.uid].logp) - rescore(module, r, done[r.uid])).abs().max()) for r in scored)
    assert worst < {torch.float32: 1e-4, torch.bfloat16: 0.3}[dtype]
    assert all(len(done[r.uid].tokens) == r.params.max_tokens or done[r.uid].tokens[-1] == 7 for r in requests)


def test_new_weights_reach_captured_steps() -> None:
    """Copied into the engine's own buffers: graphs read what is there, also the products of several weights."""
    torch.manual_seed(0)
    first, second = (sharpen(model("qwen3"), seed=seed) for seed in (1, 2))
    core = engine_core(copy.deepcopy(first).to(DEVICE), max_seqs=4)
    requests = [ask("r", prompt(20, seed=1), 30)]
    finish(core, requests)
    core.load_weights({name: tensor.to(DEVICE) for name, tensor in second.state_dict().items()})
    core.scheduler.new_version(1, recompute=False)
    done = finish(core, requests)["r"]
    torch.testing.assert_close(torch.tensor(done.logp), rescore(second, requests[0], done), atol=1e-4, rtol=0)
