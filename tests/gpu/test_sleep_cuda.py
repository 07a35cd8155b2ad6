"""On a GPU: a sleeping engine's memory is the device's again, and its captured steps survive."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from engine_support import ask, engine_core, finish, prompt, rescore, sharpen
from lockstep.models.releasable import Releasable
from lockstep.rollout.budget import SHARE, free_gib, kv_gib
from lockstep.rollout.config import RolloutConfig
from lockstep.rollout.core import EngineCore
from lockstep.types import Request
from mixtures import qwen3

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = torch.device("cuda")
KV_GIB = 0.5


def model(seed: int) -> PreTrainedModel:
    """With room for half a GiB of keys and values."""
    config = LlamaConfig(
        vocab_size=261,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2**15,
        eos_token_id=260,
        pad_token_id=256,
        bos_token_id=None,
    )
    return sharpen(LlamaForCausalLM(config), seed)


def requests() -> list[Request]:
    return [ask(f"r{n}", prompt(n, seed=n), 40, temperature=1.0, seed=n) for n in (5, 17, 40)]


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def assert_close(module: PreTrainedModel, core: EngineCore) -> None:
    done = finish(core, requests())
    for request in requests():
        completion = done[request.uid]
        found, expected = torch.tensor(completion.logp), rescore(module, request, completion)
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_memory_is_the_devices_and_graphs_stay_valid() -> None:
    module = model(0)
    core = engine_core(copy.deepcopy(module).to(DEVICE), share=True, sleep=True, kv_gib=KV_GIB, max_seqs=4)
    assert core.memory is not None
    assert core.runner.burst is not None
    assert_close(module, core)
    cache, graphs = core.runner.cache, dict(core.runner.burst._graphs)
    address, before = cache.keys.data_ptr(), free()
    core.sleep()
    assert free() - before >= core.memory.num_bytes >= 0.99 * KV_GIB * 2**30
    core.wake()
    assert abs(free() - before) < 2**24
    assert cache.keys.data_ptr() == address
    assert not cache.keys.any()
    assert_close(module, core)
    assert core.runner.burst._graphs == graphs, "nothing was captured again"


def test_answers_go_on_after_a_nap_in_a_burst() -> None:
    module = model(0)
    asked, device_module = requests(), copy.deepcopy(module).to(DEVICE)
    expected = finish(engine_core(device_module, max_seqs=4), asked)
    core = engine_core(device_module, share=True, sleep=True, kv_gib=KV_GIB, max_seqs=4)
    core.add(asked)
    core.step()
    core.sleep()
    core.wake()
    done = finish(core)
    assert {uid: c.tokens for uid, c in done.items()} == {uid: c.tokens for uid, c in expected.items()}


def test_weights_and_routes_of_its_own_come_back() -> None:
    first, second = qwen3(), qwen3()
    with torch.no_grad():
        for parameter in second.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    core = engine_core(copy.deepcopy(first).to(DEVICE), record=True, sleep=True, kv_gib=KV_GIB, max_seqs=4)
    core.add(requests())
    core.step()
    core.sleep()
    core.wake()
    core.load_weights({name: tensor.to(DEVICE) for name, tensor in first.state_dict().items()})
    finish(core)
    core.sleep()
    core.wake()
    core.load_weights({name: tensor.to(DEVICE) for name, tensor in second.state_dict().items()})
    core.scheduler.new_version(1, recompute=False)
    assert_close(second, core)


def test_more_than_the_device_has_is_refused() -> None:
    before, memory = free(), Releasable(DEVICE)
    with pytest.raises(MemoryError, match="out of memory"):
        memory.zeros(2 * torch.cuda.mem_get_info()[1], dtype=torch.uint8)
    assert memory.num_bytes == 0
    assert abs(before - free()) < 2**24


def test_too_little_memory_to_wake_is_told_and_it_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a learner held the rest of the device, which would be in the way of whatever else runs there."""
    module = model(0)
    core = engine_core(copy.deepcopy(module).to(DEVICE), share=True, sleep=True, kv_gib=KV_GIB, max_seqs=4)
    assert core.memory is not None
    core.sleep()
    asleep = free()
    with monkeypatch.context() as patched:
        patched.setattr(core.memory._blocks[-1], "restore", out_of_memory)
        with pytest.raises(
            RuntimeError, match=r"cannot wake: it had 0\.5 GiB, the device has .* smaller rollout\.kv_gib"
        ):
            core.wake()
    assert not core.awake
    assert abs(asleep - free()) < 2**24, "what was taken back is given up again"
    core.wake()
    assert_close(module, core)


def out_of_memory() -> None:
    raise MemoryError("cuMemCreate: out of memory (CUDA error 2)")


def test_memory_of_an_engine_that_is_gone_is_free() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # of tests before
    before = free()
    memory = Releasable(DEVICE)
    tensor = memory.zeros(2**28, dtype=torch.uint8)
    assert before - free() >= 2**28
    del memory
    tensor += 1
    assert int(tensor[-1]) == 1, "a tensor keeps its memory"
    del tensor
    gc.collect()
    assert before - free() < 2**24


def test_the_budget_leaves_what_it_is_told_to() -> None:
    total = free_gib(DEVICE)
    assert kv_gib(RolloutConfig(), DEVICE) == pytest.approx(SHARE * total, rel=0.01)
    assert kv_gib(RolloutConfig(), DEVICE, total / 2) == pytest.approx(SHARE * total / 2, rel=0.01)
    assert 0 < kv_gib(RolloutConfig(), DEVICE, 2 * total) < 0.2 * total
    assert kv_gib(RolloutConfig(kv_gib=3), DEVICE) == 3
