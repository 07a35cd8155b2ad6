"""What stands between products on a CPU: bit for bit what the modules of transformers compute."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from lockstep.models import pointwise
from lockstep.models.kv import KVCache
from lockstep.quant.inputs import EncodedInput, InputCode
from lockstep.quant.kernels import encode

TOKENS, QUERIES, HEADS, SIZE, PAGE = 11, 6, 2, 24, 4
EPS = 1e-6


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def norm(size: int, seed: int) -> Qwen3RMSNorm:
    module = Qwen3RMSNorm(size, EPS)
    module.weight.data = random(size, seed=seed)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_norms(dtype: torch.dtype) -> None:
    x, residual, module = random(1, 5, 96).to(dtype), random(1, 5, 96, seed=1).to(dtype), norm(96, 2).to(dtype)
    assert torch.equal(pointwise.rms_norm(x, module.weight, EPS), module(x))  # type: ignore[arg-type]
    total, normed = pointwise.add_rms_norm(x, residual, module.weight, EPS)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, module(residual + x))  # type: ignore[arg-type]


@pytest.mark.parametrize("code", [InputCode("int8"), InputCode("fp8"), InputCode("fp8", grouped=True)])
def test_gates_and_their_codes(code: InputCode) -> None:
    gate, up = random(1, 5, 256), random(1, 5, 256, seed=1)
    expected = F.silu(gate) * up
    gate_up = torch.cat((gate, up), -1)
    assert torch.equal(pointwise.gated_silu(gate_up), expected)  # type: ignore[arg-type]
    encoded = pointwise.gated_silu(gate_up, code)
    assert isinstance(encoded, EncodedInput)
    assert encoded.shape == expected.shape
    for found, wanted in zip(encoded.rows, encode(code.quantizer, expected[0]), strict=True):
        assert torch.equal(found.float(), wanted.float())


@pytest.mark.parametrize("normalised", [True, False])
@torch.no_grad()
def test_heads_are_normalised_rotated_and_stored(normalised: bool) -> None:
    config = Qwen3Config(num_hidden_layers=1, num_key_value_heads=HEADS, num_attention_heads=QUERIES, head_dim=SIZE)
    place = {"dtype": torch.float32, "device": torch.device("cpu")}
    cache = KVCache(config, num_pages=5, page_size=PAGE, **place).layer(0)
    qkv = random(TOKENS, (QUERIES + 2 * HEADS) * SIZE)
    rotary = Qwen3RotaryEmbedding(config)(qkv, torch.arange(30, 30 + TOKENS)[None])
    slots = torch.randperm(5 * PAGE, generator=torch.Generator().manual_seed(0))[:TOKENS]
    norms = norm(SIZE, 1), norm(SIZE, 2)
    weights = (norms[0].weight, norms[1].weight) if normalised else None
    found = pointwise.rotate_and_store(qkv, weights, EPS, rotary, slots, cache)

    query, key, value = qkv.view(1, TOKENS, -1, SIZE).split([QUERIES, HEADS, HEADS], 2)
    if normalised:
        query, key = norms[0](query), norms[1](key)
    query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *rotary)
    assert torch.equal(found, query[0].transpose(0, 1))
    assert torch.equal(cache.keys.flatten(0, 1)[slots], key[0].transpose(0, 1))
    assert torch.equal(cache.values.flatten(0, 1)[slots], value[0])
