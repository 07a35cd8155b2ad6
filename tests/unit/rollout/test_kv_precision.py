"""Keys and values in 8 bits."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from engine_support import ask, engine_core, finish, prompt, rescore


def test_8_bit_keys_and_values_take_half_the_memory_and_score_nearly_as_well(dense: PreTrainedModel) -> None:
    plain, eight = (engine_core(dense, pages=60, kv_precision=kv, max_seqs=64) for kv in ("high", "fp8"))
    assert eight.capacity > 1.8 * plain.capacity
    request = ask("r", prompt(40, 3), 30, temperature=1.0)
    done = finish(eight, [request])["r"]
    apart = (rescore(dense, request, done) - torch.tensor(done.logp)).abs()
    assert 0 < apart.max() < 0.5
