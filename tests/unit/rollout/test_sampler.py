from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.rollout.sampler import (
    SamplingBatch,
    SamplingTable,
    _bits,
    _first_above,
    _invert,
    sample,
    truncate,
    uniform,
)
from lockstep.types import SamplingParams

VOCAB = 40


def draw(logits: Tensor, params: list[SamplingParams], positions: list[int]) -> tuple[Tensor, Tensor]:
    table = SamplingTable(len(params), logits.shape[-1], torch.device("cpu"))
    for row, param in enumerate(params):
        table.write(row, param)
    return sample(logits, batch_of(table, torch.arange(len(params)), torch.tensor(positions)))


def batch_of(table: SamplingTable, rows: Tensor, positions: Tensor) -> SamplingBatch:
    table.flush()
    return table.batch(rows, positions, any_greedy=True, any_truncated=True)


def params(**values: float) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1, **values})  # type: ignore[arg-type]


def some_logits(rows: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def kept_distribution(logits: list[float], p: SamplingParams) -> list[float]:
    """An independent reading of the truncations, one token after another: top-k, then top-p of it, then min-p."""
    temperature = p.temperature or 1.0
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    order = order[: p.top_k or len(order)]
    total, kept, mass = sum(weights[i] for i in order), [], 0.0
    for i in order:
        if mass >= p.top_p and p.top_p < 1:
            break
        kept.append(i)
        mass += weights[i] / total
    kept = [i for i in kept if weights[i] >= p.min_p * max(weights)]
    norm = sum(weights[i] for i in kept)
    return [weights[i] / norm if i in kept else 0.0 for i in range(len(weights))]


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9, "min_p": 0.02}],
)
def test_draws_follow_the_distribution(options: dict[str, float]) -> None:
    """Chi-square over 20,000 draws at fixed seeds; tokens of zero mass are never drawn."""
    num = 20_000
    logits = some_logits(1)
    p = params(**options)
    table = SamplingTable(1, VOCAB, torch.device("cpu"))
    table.write(0, p)
    batch = batch_of(table, torch.zeros(num, dtype=torch.int64), torch.arange(num))
    tokens, logp = sample(logits.expand(num, -1), batch)
    expected = torch.tensor(kept_distribution(logits[0].tolist(), p))
    counts = torch.bincount(tokens, minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    torch.testing.assert_close(logp, expected[tokens].log(), atol=2e-5, rtol=0)
    cells = expected * num >= 5
    chi2 = ((counts - expected * num)[cells] ** 2 / (expected * num)[cells]).sum()
    freedom = int(cells.sum()) - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    top_k=st.integers(0, VOCAB + 3),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.5),
    temperature=st.floats(0.3, 3.0),
)
def test_log_probs_are_of_the_truncated_distribution(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    p = params(seed=seed, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    logits = some_logits(1, seed)
    (token,), (logp,) = draw(logits, [p], [3])
    assert logp.exp().item() == pytest.approx(kept_distribution(logits[0].tolist(), p)[token], abs=1e-5)


@pytest.mark.parametrize("vocab", [4097, 9000, 4096 + 128])
def test_large_vocabularies_are_inverted_in_blocks(vocab: int) -> None:
    """The same tokens as by one running sum, also at the ends of the unit interval, and never one of zero mass."""
    logits = torch.randn(50, vocab, generator=torch.Generator().manual_seed(1)) * 3
    logits[:, :300] = logits[:, -200:] = -torch.inf
    probs = logits.softmax(-1)
    for u in (torch.zeros(50), torch.full((50,), 1 - 2.0**-53), torch.rand(50, generator=torch.Generator())):
        cdf = probs.double().cumsum(-1)
        (found, mass), expected = _invert(probs, u.double()), _first_above(cdf, u.double() * cdf[:, -1])
        assert torch.equal(found, expected)
        torch.testing.assert_close(mass, cdf[:, -1])
        assert bool((probs.gather(1, found[:, None]) > 0).all())
    assert _invert(torch.full((1, vocab), torch.nan), torch.ones(1).double() / 2)[0] < vocab


def test_a_row_does_not_depend_on_the_rest_of_the_batch() -> None:
    """Also not on whether others truncate, which takes another path through the sampler."""
    logits = some_logits(64, scale=8.0)
    mixed = [params(seed=i, top_k=3 * (i % 2), temperature=0.0 if i % 5 == 0 else 1.0) for i in range(64)]
    tokens, logp = draw(logits, mixed, list(range(64)))
    for i in range(64):
        (token,), (value,) = draw(logits[i : i + 1], [mixed[i]], [i])
        assert (token, value) == (tokens[i], logp[i])


def test_off_is_off_next_to_a_truncating_row() -> None:
    """Rounding of the cumulated mass must not cut the tail of a row that does not truncate."""
    logits = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(0)).expand(2, -1)
    plain, truncating = params(seed=1), params(seed=1, top_p=0.5)
    table = SamplingTable(2, 50_000, torch.device("cpu"))
    table.write(0, plain)
    table.write(1, truncating)
    kept = truncate(logits, batch_of(table, torch.arange(2), torch.zeros(2)))
    assert torch.equal(kept[0], logits[0])
    assert kept[1].isinf().any()


def test_seed_and_position_reproduce_and_matter() -> None:
    logits = some_logits(1).expand(200, -1)
    same = draw(logits, [params(seed=7)] * 200, [5] * 200)[0]
    assert len(set(same.tolist())) == 1
    by_seed = draw(logits, [params(seed=i) for i in range(200)], [5] * 200)[0]
    by_position = draw(logits, [params(seed=7)] * 200, list(range(200)))[0]
    assert len(set(by_seed.tolist())) > 5
    assert len(set(by_position.tolist())) > 5


def test_greedy_takes_the_first_largest_scored_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    (token,), (logp,) = draw(logits, [params(temperature=0.0)], [0])
    assert token == 1
    torch.testing.assert_close(logp, logits.log_softmax(-1)[0, 1])


def test_impossible_tokens_are_never_drawn_even_at_the_edges() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, -200.0, 1.0, -torch.inf]]).expand(4000, -1)
    tokens, logp = draw(logits, [params(seed=i) for i in range(4000)], [0] * 4000)
    assert set(tokens.tolist()) == {1, 4}
    assert logp.isfinite().all()


def test_nan_logits_give_a_nan_log_prob_not_a_crash() -> None:
    """Learning refuses such a sample and counts it; the engine and its other rows go on."""
    logits = some_logits(2)
    logits[0] = torch.nan
    tokens, logp = draw(logits, [params(), params()], [0, 0])
    assert 0 <= tokens[0] < VOCAB
    assert logp[0].isnan()
    assert logp[1].isfinite()


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(-(2**63), 2**63 - 1), counter=st.integers(0, 2**40))
def test_uniform_matches_splitmix64(seed: int, counter: int) -> None:
    """The same generator in Python's unbounded integers."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = (z + golden) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    expected = (mix((mix(seed & mask) + counter * golden) & mask) >> 11) * 2.0**-53
    found = uniform(torch.tensor([seed]), torch.tensor([counter])).item()
    assert found == expected
    assert 0 <= found < 1


def test_uniform_is_even_and_neighbours_are_unrelated() -> None:
    """Over a grid of adjacent seeds and positions: moments, and correlations at small steps in both directions."""
    seeds, positions = torch.meshgrid(torch.arange(300), torch.arange(300), indexing="ij")
    u = uniform(seeds, positions)
    num = u.numel()
    assert abs(u.mean() - 0.5) < 4 * math.sqrt(1 / 12 / num)
    assert abs(u.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / num)
    centred = (u - 0.5) * math.sqrt(12)
    for down, right in ((0, 1), (1, 0), (1, 1), (2, 0), (0, 2), (1, 2)):
        product = centred[: 300 - down, : 300 - right] * centred[down:, right:]
        assert abs(product.mean()) < 4 / math.sqrt(product.numel()), (down, right)


@given(seed=st.integers(-(2**63), 2**63 - 1), counter=st.integers(0, 2**40))
def test_both_libraries_make_the_same_numbers(seed: int, counter: int) -> None:
    seeds, counters = torch.tensor([seed]), torch.tensor([counter])
    assert torch.equal(torch.from_numpy(_bits(seeds.numpy(), counters.numpy())), _bits(seeds, counters))
    assert torch.equal(uniform(seeds, counters), _bits(seeds, counters).double() * 2.0**-53)
