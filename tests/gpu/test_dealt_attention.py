"""Decode attention whose pages are dealt out evenly, against plain torch; and how they are dealt out.

On a Hopper GPU; `deal` also anywhere with triton installed and TRITON_INTERPRET=1.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine_support import ask, engine_core, finish, prompt, rescore, sharpen
from kernel_support import DEVICE, MARKS
from lockstep.models.kv import Pages
from lockstep.models.paged import PagedStep, Segment, _attend

pytestmark = MARKS
PAGE = 16
LENGTHS = {
    "one": [5],
    "a long one": [4000],
    "even": [300] * 40,
    "uneven": [1, 2000, 17, 16, 64, 65, 640, 3],
    "whole pages": [16, 32, 64, 128],
    "long ones and short ones": [3000, 20, 1500, 40, 40, 5000, 16, 900],
    "one for each share": [512] * 33,
    "short ones": [1 + 37 * i % 600 for i in range(131)],
}


@pytest.mark.parametrize("case", LENGTHS)
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_every_page_is_dealt_out_once(case: str, heads: int) -> None:
    """To shares of about a size, in which short sequences are whole; programs find the pieces of a sequence."""
    from lockstep.models.kernels import dealt

    lengths = LENGTHS[case]
    work = dealt.deal(torch.tensor(lengths, device=DEVICE), heads, PAGE)
    start, (size,) = work.start.tolist()[:-2], work.share_size.tolist()
    near = size // dealt.NEAR.value
    assert work.start.tolist()[-2:] == [start[-1]] * 2, "for who looks ahead"
    assert work.lengths.tolist() == [*lengths, 0]
    assert work.arrived.tolist() == [0] * (len(lengths) * heads)
    assert [b - a for a, b in pairwise(start)] == [-(-length // PAGE) for length in lengths]
    begin, first = work.share_start.tolist(), work.share_sequence.tolist()
    assert start[0] == begin[0] == 0
    assert begin[-1] == start[-1]
    for share, (low, high) in enumerate(pairwise(begin)):
        assert 0 <= high - low <= size + 2 * near
        assert low == high or start[first[share]] <= low < start[first[share] + 1]
    for low, high in pairwise(start):
        pieces = [n for n, (a, b) in enumerate(pairwise(begin)) if a < high and b > low and a < b]
        assert pieces == list(range(pieces[0], pieces[-1] + 1))
        assert high - low > 2 * near or len(pieces) == 1
        assert (pieces[0], len(pieces)) == cast(Any, dealt._cut).fn(low, high, size)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="Gluon has no interpreter")
@pytest.mark.parametrize("case", LENGTHS)
@pytest.mark.parametrize(
    ("heads", "group", "size"), [(8, 2, 128), (8, 4, 128), (2, 1, 64), (4, 8, 128), (2, 12, 128), (1, 20, 128)]
)
def test_dealt_attention(case: str, heads: int, group: int, size: int) -> None:
    """Twice, with the same bits, whoever comes last. What no sequence has a key in is not a number."""
    from lockstep.models.kernels import dealt

    lengths = torch.tensor(LENGTHS[case], device=DEVICE)
    batch, longest = len(lengths), -(-int(lengths.max()) // PAGE)
    torch.manual_seed(0)
    table = 1 + torch.randperm(batch * longest, device=DEVICE).view(batch, longest)
    keys, values = torch.randn(2, batch * longest + 1, PAGE, heads, size, device=DEVICE).bfloat16()
    cache = Pages(keys, values, None, None)
    forget_what_nobody_has(cache, table, lengths)
    query = torch.randn(batch, heads * group, size, device=DEVICE).bfloat16()
    work = dealt.deal(lengths, heads, PAGE)
    torch.cuda.synchronize()  # in a step, the embedding comes between
    found = dealt.decode(query, cache, table, work, 0.1)
    assert torch.equal(dealt.decode(query, cache, table, work, 0.1), found)

    segment = Segment(slice(0, batch), table, lengths - 1)
    step = PagedStep(cache=cast(Any, SimpleNamespace(page_size=PAGE)), slots=lengths, segments=[segment])
    seen = Pages(keys.nan_to_num(0).float(), values.nan_to_num(0).float(), None, None)
    expected = _attend(query.float(), seen, segment, step.mask(0, None), 0.1)
    error, largest = ((x.abs().amax((1, 2))) for x in (found.float() - expected, expected))
    assert (error < 1e-2 * largest).all(), "a page more or less would be seen"


@pytest.mark.skipif(DEVICE.type != "cuda", reason="Gluon has no interpreter")
def test_answers_of_any_length_score_as_in_a_full_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.models.kernels import dealt

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=261, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, bos_token_id=None, eos_token_id=260,
        pad_token_id=256,
    )  # fmt: skip
    module, batches, deal = sharpen(Qwen3ForCausalLM(config), std=0.08), set[int](), dealt.deal
    monkeypatch.setattr(dealt, "deal", lambda lengths, *sizes: batches.add(len(lengths)) or deal(lengths, *sizes))
    core = engine_core(cast(Any, copy.deepcopy(module)).to(DEVICE, torch.bfloat16), max_seqs=24)
    assert batches == {8, 12, 16, 24}
    for memory in (core.runner.cache.keys, core.runner.cache.values):
        memory.fill_(float("nan"))  # a key that is read before it is written would be seen
    requests = [ask(f"{i}", prompt(3 + 29 * i, i), 20 + 5 * i, temperature=1.0, seed=i) for i in range(30)]
    done = finish(core, requests)
    worst = max(float((torch.tensor(done[r.uid].logp) - rescore(module, r, done[r.uid])).abs().max()) for r in requests)
    assert worst < 0.3


def forget_what_nobody_has(cache: Pages, table: Tensor, lengths: Tensor) -> None:
    has = torch.zeros(cache.keys.shape[:2], dtype=torch.bool, device=DEVICE)
    for pages, length in zip(table, lengths.tolist(), strict=True):
        at = torch.arange(length, device=DEVICE)
        has[pages[at // PAGE], at % PAGE] = True
    for x in cache[:2]:
        x[~has] = float("nan")
