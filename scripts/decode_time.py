"""Where the time of a decode step goes: on a GPU, in bfloat16, with random weights, keys and values.

    python scripts/decode_time.py

Prints two tables for docs/benchmarks/rollout.md. Whole steps of few sequences, whose pages are read by
`attention.decode` or dealt out; and the products of a step of many, by themselves, with what the board draws and how
fast it runs meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.cli.gpu_clocks import Sample, means, sampled
from lockstep.cli.rollout_workloads import SHAPES
from lockstep.models.engine_view import engine_view
from lockstep.models.few_rows import for_capture, linear_function
from lockstep.models.kv import PAGE_SIZE, KVCache
from lockstep.models.paged import PagedStep, Segment, deal
from lockstep.quant.kernels.counters import Counters

DEVICE = torch.device("cuda")
ROUNDS, SETTLE = 7, 1.0  # seconds until the board's clock is that of the work
STEPS = {
    "0.6b": ((8, 3000, 3000), (24, 1500, 1500), (40, 750, 1500), (40, 1500, 1500), (48, 1500, 1500), (64, 1150, 2300),
             (128, 600, 1200)),
    "8b": ((8, 4000, 4000), (32, 1536, 1536), (40, 1200, 1200), (128, 600, 600)),
}  # fmt: skip
PRODUCTS = (("0.6b", 512), ("8b", 256))


@dataclass(frozen=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    counters: Counters  # live as long as the graph

    def milliseconds(self, seconds: float) -> float:
        """Of one replay, among those that take about so long."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.graph.replay()
        torch.cuda.synchronize()
        started, count = time.monotonic(), 0
        begin.record()
        while time.monotonic() - started < seconds:
            for _ in range(10):
                self.graph.replay()
            count += 10
            torch.cuda.synchronize()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count


def capture(run: Callable[[], object]) -> Captured:
    counters, graph, side = Counters(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.inference_mode(), for_capture(counters):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            run()
    return Captured(graph, counters)


def step(view: PreTrainedModel, cache: KVCache, lengths: Tensor, *, dealt: bool) -> Captured:
    """A forward of one token for each sequence; pages lie anywhere."""
    pages = -(-int(lengths.max()) // PAGE_SIZE)
    table = torch.randperm(len(lengths) * pages, device=DEVICE).view(len(lengths), pages)
    last = lengths - 1
    slots = table.gather(1, (last // PAGE_SIZE)[:, None])[:, 0] * PAGE_SIZE + last % PAGE_SIZE
    tokens = torch.zeros(1, len(lengths), dtype=torch.int64, device=DEVICE)

    def run() -> None:
        work = deal(lengths, cache, view.config.num_attention_heads) if dealt else None
        assert dealt == (work is not None), "this device or batch has no pages dealt out"
        segment = Segment(slice(0, len(lengths)), table, last, work=work)
        now = PagedStep(cache=cache, slots=slots, segments=[segment])
        view(input_ids=tokens, position_ids=last[None], use_cache=False, lockstep=now)

    return capture(run)


def time_steps(name: str) -> None:
    shape, cases = SHAPES[name], STEPS[name]
    view = engine_view(shape.module(8192, DEVICE), share=True)
    num_pages = max(sequences * -(-longest // PAGE_SIZE) for sequences, _, longest in cases)
    cache = KVCache(view.config, num_pages=num_pages, page_size=PAGE_SIZE, dtype=view.dtype, device=DEVICE)
    for memory in (cache.keys, cache.values):
        memory.normal_()
    for sequences, shortest, longest in cases:
        torch.manual_seed(0)
        lengths = torch.randint(shortest, longest + 1, (sequences,), device=DEVICE)
        both = [step(view, cache, lengths, dealt=dealt) for dealt in (False, True)]
        times = [[captured.milliseconds(0.05) for captured in both] for _ in range(ROUNDS)]  # in turns
        by_itself, dealt = (median(column) for column in zip(*times, strict=True))
        told = f"{longest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
        print(
            f"| {name} | {sequences} | {told} | {by_itself:.2f} | {dealt:.2f} | {dealt / by_itself:.2f} |", flush=True
        )


def time_products(name: str, rows: int, samples: Sequence[Sample]) -> None:
    config = SHAPES[name].config(8192)
    size, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    stacked = heads + 2 * config.num_key_value_heads * config.head_dim
    block = (stacked, size), (size, heads), (2 * config.intermediate_size, size), (size, config.intermediate_size)
    shapes = [*block * config.num_hidden_layers, (config.vocab_size, size)]
    weights = [torch.randn(shape, device=DEVICE).mul_(0.02).bfloat16() for shape in shapes]
    inputs = {columns: torch.randn(rows, columns, device=DEVICE).bfloat16() for _, columns in shapes}
    captured = capture(lambda: [linear_function(w)(inputs[w.shape[1]], w) for w in weights])
    captured.milliseconds(SETTLE)
    begun = time.monotonic()
    ms = captured.milliseconds(2 * SETTLE)
    watts, mhz = means(samples, begun, time.monotonic())
    flops = 2 * rows * sum(w.numel() for w in weights)
    drawn = " | ".join("–" if mean is None else f"{mean:,.0f}" for mean in (watts, mhz))
    print(f"| {name} | {rows} | {ms:.2f} | {flops / ms / 1e9:.0f} | {drawn} |", flush=True)


def main() -> None:
    print("| shape | sequences | keys of each | ms/step | dealt out, ms/step | ratio |\n|---|---|---|---|---|---|")
    for name in STEPS:
        time_steps(name)
    print("\n| shape | rows | ms of products | TFLOP/s | W | MHz |\n|---|---|---|---|---|---|")
    with sampled(DEVICE) as samples:
        for name, rows in PRODUCTS:
            time_products(name, rows, samples)


if __name__ == "__main__":
    main()
