"""The engine's attention over pages, and what writes them, against plain torch.

On a GPU; or anywhere with triton installed and TRITON_INTERPRET=1, in float32.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from kernel_support import DEVICE, DTYPES, ERROR, MARKS
from lockstep.models.kv import KVCache, Pages
from lockstep.models.paged import PagedStep, Segment, Shared, _attend, _attend_fused
from lockstep.rollout.sharing import Neighbours, as_rows, find_neighbours

pytestmark = MARKS
PAGES, PAGE = 40, 16
CUTS = [(1, "LARGE"), (1, "SMALL"), (3, "MANY"), (7, "SMALL")]
E4M3 = torch.float8_e4m3fn


def pages_of(num_seqs: int) -> Tensor:
    return torch.randperm(PAGES, generator=torch.Generator().manual_seed(0))[: num_seqs * 12].view(num_seqs, 12)


def cache_of(heads: int, size: int, dtype: torch.dtype) -> KVCache:
    config = LlamaConfig(num_hidden_layers=1, num_key_value_heads=heads, head_dim=size)
    cache = KVCache(config, num_pages=PAGES, page_size=PAGE, dtype=dtype, device=DEVICE)
    torch.manual_seed(1)
    slots = torch.arange(PAGES * PAGE, device=DEVICE)
    kind = torch.float32 if dtype == E4M3 else dtype
    key, value = torch.randn(2, len(slots), heads, size, device=DEVICE).to(kind)
    cache.layer(0).store(slots, key, value)
    return cache


def cut(splits: int, tile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode attention computes keys in so many pieces, by that tile, whatever the batch."""
    from lockstep.models.kernels import attention

    monkeypatch.setattr(attention, "num_splits", lambda programs, processors: splits)
    monkeypatch.setattr(attention, "fill", lambda programs, places: 4 - splits % 2)  # what groups have in common
    monkeypatch.setattr(attention, "choose_tile", lambda *of: getattr(attention, tile))


def assert_attends(cache: KVCache, segment: Segment, query: Tensor, window: int | None, exact: bool = False) -> None:
    pages = cache.layer(0)
    step = PagedStep(cache=cache, slots=torch.empty(0), segments=[segment])
    plain = pages if pages.key_scales is not None else Pages(pages.keys.float(), pages.values.float(), None, None)
    expected = _attend(query.float(), plain, segment, step.mask(0, window), 0.2)
    found = _attend_fused(query, pages, segment, 0.2, window, exact)
    grid = 1e-4 if exact else 0.0  # that of scores
    assert (found.float() - expected).abs().max() < ERROR[query.dtype] + grid


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "group", "size"), [(2, 2, 16), (1, 4, 128), (2, 1, 64), (1, 20, 32)])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("splits", "tile"), CUTS)
def test_decode_attention(
    dtype: torch.dtype, heads: int, group: int, size: int, window: int | None, splits: int, tile: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    cut(splits, tile, monkeypatch)
    segment = Segment(slice(0, 3), pages_of(3).to(DEVICE), torch.tensor([150, 0, 77], device=DEVICE))
    query = torch.randn(3, heads * group, size, device=DEVICE).to(dtype)
    for exact in (False, True):
        assert_attends(cache_of(heads, size, dtype), segment, query, window, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "group", "size"), [(2, 2, 16), (1, 4, 128)])
@pytest.mark.parametrize("window", [None, 20])
def test_prefill_attention(dtype: torch.dtype, heads: int, group: int, size: int, window: int | None) -> None:
    start, count = torch.tensor([[60, 0, 77], [30, 100, 5]], device=DEVICE)
    segment = Segment(slice(0, 135), pages_of(3).to(DEVICE), start, count, longest=100)
    query = torch.randn(135, heads * group, size, device=DEVICE).to(dtype)
    for exact in (False, True):
        assert_attends(cache_of(heads, size, dtype), segment, query, window, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize(("splits", "tile"), CUTS)
def test_attention_to_8_bit_keys_and_values(
    dtype: torch.dtype, size: int, splits: int, tile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(splits, tile, monkeypatch)
    cache = cache_of(2, size, E4M3)
    pages, query = pages_of(3).to(DEVICE), torch.randn(135, 4, size, device=DEVICE).to(dtype)
    start, count = torch.tensor([[60, 0, 77], [30, 100, 5]], device=DEVICE)
    for window in (None, 20):
        assert_attends(cache, Segment(slice(0, 135), pages, start, count, longest=100), query, window)
        assert_attends(cache, Segment(slice(0, 3), pages, start), query[:3], window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [40, 70])
def test_a_key_or_value_that_is_nan_is_not_lost_in_8_bits(dtype: torch.dtype, place: int) -> None:
    from lockstep.models.kernels.pointwise import rotate_and_store

    cache, table = cache_of(1, 32, E4M3), torch.ones(1, 32, device=DEVICE).to(dtype)
    qkv = torch.randn(1, 3 * 32, device=DEVICE).to(dtype)
    qkv[0, place] = torch.nan
    slots, pages = torch.tensor([5], device=DEVICE), torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    query = rotate_and_store(qkv, None, 0.0, (table, table), slots, cache.layer(0))
    assert query.isfinite().all()
    segment = Segment(slice(0, 1), pages, torch.tensor([5], device=DEVICE))
    assert _attend_fused(query, cache.layer(0), segment, 0.2, None).isnan().all()


@pytest.mark.skipif(DEVICE.type != "cuda", reason="Triton's interpreter rounds to bfloat16 otherwise")
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("heads", "group", "size"), [(2, 2, 128), (1, 4, 64)])
def test_results_are_rounded_alike_however_keys_are_cut(
    exact: bool, window: int | None, heads: int, group: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode step in any number of pieces, alone or with others that share pages, and the last query of a prefill."""
    cache = cache_of(heads, size, torch.bfloat16)
    pages = pages_of(3).to(DEVICE)
    start, count = torch.tensor([[0, 0, 0], [180, 131, 70]], device=DEVICE)
    query = torch.randn(int(count.sum()), heads * group, size, device=DEVICE).to(torch.bfloat16)
    last = count.cumsum(0) - 1
    pages[1, :5] = pages[0, :5]  # these two share 80 tokens
    whole = Segment(slice(0, len(query)), pages, start, count, longest=180)
    expected = _attend_fused(query, cache.layer(0), whole, 0.5, window, exact)[last]
    segments = [Segment(slice(0, 3), pages, count - 1)]
    if window is None:
        shared = Shared(*torch.tensor(as_rows([Neighbours(0, 2, 5), Neighbours(2, 1, 0)], 3, PAGE), device=DEVICE))
        segments.append(Segment(slice(0, 3), pages, count - 1, shared=shared))
    tiles = ("LARGE", "MANY", "FEW_EXACT" if exact else "SMALL")
    for tile in tiles if window is None else tiles[:1]:
        for splits in (1, 2, 5):
            cut(splits, tile, monkeypatch)
            for segment in segments:
                found = _attend_fused(query[last], cache.layer(0), segment, 0.5, window, exact)
                assert float((found != expected).float().mean()) <= (0.0 if exact else 0.01)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="Triton's interpreter rounds to bfloat16 otherwise")
@pytest.mark.parametrize("norm", [False, True])
def test_heads_are_rotated_to_the_bit(norm: bool) -> None:
    """Where a product and a sum are fused, a fifth of them differ."""
    from lockstep.models import pointwise
    from lockstep.models.kernels import pointwise as compiled

    torch.manual_seed(3)
    qkv, norms = (torch.randn(*shape, device=DEVICE).bfloat16() for shape in ((600, 8 * 128), (2, 128)))
    angles, slots = torch.rand(600, 128, device=DEVICE) * 100, torch.arange(600, device=DEVICE)
    rotary = angles.cos().bfloat16()[None], angles.sin().bfloat16()[None]
    caches = [cache_of(2, 128, torch.bfloat16) for _ in range(2)]
    given = qkv, (norms[0], norms[1]) if norm else None, 1e-6, rotary, slots
    ours, theirs = (
        kind.rotate_and_store(*given, c.layer(0)) for kind, c in zip((compiled, pointwise), caches, strict=True)
    )
    most = 1e-3 if norm else 0.0  # the sum of squares may be a bit apart
    assert float((ours.flatten(1) != theirs.flatten(1)).float().mean()) <= most
    assert float((caches[0].keys != caches[1].keys).float().mean()) <= most
    assert torch.equal(caches[0].values, caches[1].values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tokens_are_rotated_as_few_are(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some at a time, of which the last program has fewer."""
    from lockstep.models.kernels import pointwise

    torch.manual_seed(3)
    qkv, norms = torch.randn(21, 4 * 2 * 32, device=DEVICE).to(dtype), torch.rand(2, 32, device=DEVICE).to(dtype)
    angles, slots = torch.rand(21, 32, device=DEVICE), torch.arange(21, device=DEVICE) * 17
    rotary = angles.cos().to(dtype), angles.sin().to(dtype)
    one_by_one, some = (cache_of(2, 32, dtype) for _ in range(2))
    arguments = qkv, (norms[0], norms[1]), 1e-6, rotary, slots
    expected = pointwise.rotate_and_store(*arguments, one_by_one.layer(0))
    monkeypatch.setattr(pointwise, "FEW_TOKENS", 4)
    assert torch.equal(pointwise.rotate_and_store(*arguments, some.layer(0)), expected)
    assert torch.equal(some.keys, one_by_one.keys)
    assert torch.equal(some.values, one_by_one.values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_8_bit_pages_are_written_as_torch_would(dtype: torch.dtype) -> None:
    from lockstep.models.kernels.pointwise import rotate_and_store

    torch.manual_seed(3)
    qkv, slots = torch.randn(6, 3 * 2 * 32, device=DEVICE).to(dtype), torch.arange(6, device=DEVICE) * 17
    qkv[2] = 0
    straight = (torch.ones(6, 32, device=DEVICE), torch.zeros(6, 32, device=DEVICE))  # no rotation
    found, expected = (cache_of(2, 32, E4M3).layer(0) for _ in range(2))
    rotate_and_store(qkv, None, 0.0, straight, slots, found)
    expected.store(slots, *qkv.view(6, 3, 2, 32)[:, 1:].unbind(1))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is not None
        assert theirs is not None
        by_token = (x.float() if x.dim() == 4 else x.mT for x in (ours, theirs))
        written = (x.flatten(0, 1)[slots] for x in by_token)
        assert torch.isclose(*written).float().mean() > 0.98  # quotients round a code apart now and then


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "group", "size"), [(2, 2, 16), (1, 4, 128), (1, 20, 32)])
@pytest.mark.parametrize(("splits", "tile"), CUTS)
@pytest.mark.parametrize("eight_bits", [False, True])
def test_neighbours_read_what_they_share_once(
    dtype: torch.dtype, heads: int, group: int, size: int, splits: int, tile: str, eight_bits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Groups of 8, 2 and 1; what is only read through the first member's pages is wrong in the others'."""
    cut(splits, tile, monkeypatch)
    cache = cache_of(heads, size, E4M3 if eight_bits else dtype)
    pages = torch.stack([pages_of(3)[min(i // 8, 1)] for i in range(11)]).to(DEVICE)
    pages[:, 6:] = torch.arange(11, device=DEVICE)[:, None] + torch.arange(6, device=DEVICE)
    groups = [Neighbours(0, 8, 5), Neighbours(8, 2, 2), Neighbours(10, 1, 0)]
    assert find_neighbours([[*p[:5], 100 + i] if i < 10 else [7] for i, p in enumerate(pages.tolist())])[0] == groups[0]
    start = torch.tensor([80 + 9 * i for i in range(10)] + [0], device=DEVICE)
    query = torch.randn(11, heads * group, size, device=DEVICE).to(dtype)
    shared = Shared(*torch.tensor(as_rows(groups, 11, PAGE), device=DEVICE))
    broken = pages.clone()
    broken[1:8, :5] = 0
    broken[9, :2] = 0
    found = _attend_fused(query, cache.layer(0), Segment(slice(0, 11), broken, start, shared=shared), 0.2, None)
    expected = _attend_fused(query, cache.layer(0), Segment(slice(0, 11), pages, start), 0.2, None)
    assert (found.float() - expected.float()).abs().max() < ERROR[dtype]
