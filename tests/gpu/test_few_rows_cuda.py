"""Our bfloat16 products of few rows against the library's, and against exact sums."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine_support import ask, engine_core, finish, prompt
from lockstep.models.few_rows import LEAST_WEIGHTS, for_capture, linear_function
from lockstep.rollout.burst import batch_sizes
from lockstep.rollout.core import EngineCore
from lockstep.types import Completion

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

# tiles of which the last is not full, K that is no multiple of a step, tiles that do not go round
SHAPES = [
    (1, 64, 128), (5, 72, 1000), (16, 4096, 4096), (17, 1024, 3072), (31, 4096, 12288), (32, 20000, 520),
    (33, 1024, 2048), (49, 24576, 4096), (64, 4096, 1024), (77, 12288, 2048), (100, 4096, 1024), (128, 1024, 3072),
]  # fmt: skip


def given(M: int, N: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(M, K, device="cuda"), torch.randn(N, K, device="cuda") * 0.05
    return x.bfloat16(), weight.bfloat16()


@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
def test_they_are_as_exact_as_the_librarys_and_repeatable(M: int, N: int, K: int) -> None:
    from lockstep.models.kernels import few_rows

    x, weight = given(M, N, K)
    exact = x.double() @ weight.double().T
    found = [few_rows.linear(x, weight) for _ in range(5)]
    error, library = ((y.double() - exact).norm() for y in (found[0], F.linear(x, weight)))
    assert error < 1.05 * library
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("rows", [1, 16, 32, 64, 128])
def test_a_chain_of_them_awaits_its_inputs(rows: int) -> None:
    """Each is launched while the one before still runs. Captured, as the engine runs them."""
    from lockstep.models.kernels import few_rows

    x, weight = given(rows, 3072, 3072)
    few_rows.linear(x, weight)

    def chain(between: Callable[[], None]) -> torch.Tensor:
        y = x
        for _ in range(12):
            y = few_rows.linear(y, weight)
            between()
            y = y / y.float().norm(dim=-1, keepdim=True).bfloat16()
            for _ in range(2):
                y = few_rows.linear(y, weight)
                between()
        return y

    expected, graph = chain(torch.cuda.synchronize), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(lambda: None)
    for _ in range(20):
        found.fill_(torch.nan)
        graph.replay()
        assert torch.equal(found, expected)


def test_linear_layers_use_them_where_few_rows_are_captured() -> None:
    from lockstep.models.kernels import few_rows

    layer = torch.nn.Linear(1024, 2048, device="cuda", dtype=torch.bfloat16)
    linear = linear_function(layer.weight)
    assert layer.weight.numel() >= LEAST_WEIGHTS
    for shape in ((0, 1024), (1, 3, 1024), (300, 1024)):
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        for bias in (None, layer.bias):
            library = F.linear(x, layer.weight, bias)
            assert torch.equal(linear(x, layer.weight, bias), library)
            with for_capture({}):
                found = linear(x, layer.weight, bias)
            torch.testing.assert_close(found, library)
            if x.numel() == 3 * 1024 and bias is None:
                assert torch.equal(found[0], few_rows.linear(x[0], layer.weight))
    assert linear_function(layer.weight.float()) is F.linear
    assert linear_function(layer.weight[:100]) is F.linear


def small_model(layers: int) -> Qwen3ForCausalLM:
    """The last product of its layers is cut into pieces."""
    config = Qwen3Config(
        vocab_size=2048, hidden_size=1024, intermediate_size=2048, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=128,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to("cuda", torch.bfloat16)


def test_engines_that_run_at_the_same_time_do_not_share_pieces() -> None:
    """Each on a stream of its own, from a thread of its own."""
    from lockstep.models.kernels.few_rows import cut

    torch.manual_seed(0)
    assert cut(16, 1024, 2048, torch.cuda.get_device_properties(0).multi_processor_count).pieces > 1
    cores = [engine_core(small_model(4), max_seqs=16) for _ in range(2)]
    requests = [ask(f"{i}", prompt(20, i), 100, temperature=1.0, seed=i) for i in range(16)]

    def answers(core: EngineCore) -> dict[str, Completion]:
        with torch.cuda.stream(torch.cuda.Stream()):
            core.scheduler.forget_prefixes()
            return finish(core, requests)

    alone = [answers(core) for core in cores]
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(answers, cores))
    for expected, found in zip(alone, together, strict=True):
        assert [found[r.uid].tokens for r in requests] == [expected[r.uid].tokens for r in requests]
        assert [found[r.uid].logp for r in requests] == [expected[r.uid].logp for r in requests]


def test_captured_steps_run_them_up_to_their_most_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.models.kernels import few_rows

    linear, rows = few_rows.linear, set[int]()
    monkeypatch.setattr(few_rows, "linear", lambda x, weight: rows.add(len(x)) or linear(x, weight))
    engine_core(small_model(1), max_seqs=160)
    assert rows == {size for size in batch_sizes(160) if size <= few_rows.MOST_ROWS}
