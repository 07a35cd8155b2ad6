"""Low-bit linear layers against bfloat16 and against the time it takes to read their weights, on one GPU.

The problems: the linear layers of a Qwen3-8B block, stacked where they share an input and as the model has them, and
the experts of a Qwen3-30B-A3B block. A pass runs every
layer of the problem once. Passes over several copies of the weights are captured in one CUDA graph, as decoding runs,
so launches cost little and no weight is found in the L2 cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from lockstep.config import ConfigError
from lockstep.quant.format import Format
from lockstep.quant.formats.fp8_w8a8 import FP8W8A8
from lockstep.quant.formats.int8_w8a8 import INT8W8A8
from lockstep.quant.formats.w4a8 import W4A8
from lockstep.quant.formats.w4a16 import W4A16
from lockstep.quant.kernels import choose
from lockstep.quant.kernels.reference import GROUP

BYTES_PER_S = 4.24e12  # of an H200, measured
ROTATED_BYTES = 600e6  # ten times its L2 cache
REPLAYS = 30
EXPERTS, TOP_K = 128, 8

Layer = tuple[str, int, int]  # name, outputs, inputs
BLOCK: tuple[Layer, ...] = (
    ("q", 4096, 4096), ("k", 1024, 4096), ("v", 1024, 4096), ("o", 4096, 4096),
    ("gate", 12288, 4096), ("up", 12288, 4096), ("down", 4096, 12288),
)  # fmt: skip
FUSED_BLOCK: tuple[Layer, ...] = (
    ("qkv", 6144, 4096), ("o", 4096, 4096), ("gate_up", 24576, 4096), ("down", 4096, 12288),
)  # fmt: skip
EXPERT_BLOCK: tuple[Layer, ...] = (("gate_up", 1536, 2048), ("down", 2048, 768))


@dataclass(frozen=True, slots=True)
class Contender:
    """A format: how weights and rows become its tensors, and its products over them."""

    name: str
    encode_weight: Callable[[Tensor], tuple[Tensor, ...]]
    encode_rows: Callable[[Tensor], tuple[Tensor, ...]]
    product: Callable[..., Tensor]  # (*rows, *weight, dtype)
    grouped: Callable[..., Tensor]  # (*rows, offsets, *weight, dtype)


def formats() -> dict[str, Format]:
    """All of them, by the name in the tables."""
    return {
        "int8_w8a8": INT8W8A8(),
        "fp8_w8a8": FP8W8A8(),
        "fp8 blocks": FP8W8A8(block=True),
        "w4a16": W4A16(),
        "w4a8, int8": W4A8(),
        "w4a8, fp8": W4A8(inputs="fp8"),
    }


def contenders() -> list[Contender]:
    """bfloat16 first."""
    bf16 = Contender("bf16", lambda w: (w.bfloat16(),), lambda x: (x,), _linear, _grouped_linear)
    return [bf16, *(_contender(name, format) for name, format in formats().items())]


def _contender(name: str, format: Format) -> Contender:
    def kernel(operation: str) -> Callable[..., Tensor]:
        return choose(operation, "cuda", (GROUP, GROUP), torch.bfloat16).run

    def encode_weight(weight: Tensor) -> tuple[Tensor, ...]:
        return tuple(format.encode_weight(weight).tensors.values())

    operation = format.operation
    return Contender(name, encode_weight, format.encode_input, kernel(operation), kernel(f"grouped_{operation}"))


def _linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return F.linear(x, weight)


def _grouped_linear(x: Tensor, offsets: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return torch._grouped_mm(x, weight.mT, offs=offsets[1:])


@dataclass(frozen=True, slots=True)
class Problem:
    """The layers of a pass for a number of tokens, with their bfloat16 inputs."""

    layers: Sequence[Layer]
    tokens: int
    inputs: dict[int, Tensor]  # by width
    offsets: Tensor | None = None  # rows of each expert

    @property
    def used(self) -> int:
        """Weights that are read: experts with rows."""
        return 1 if self.offsets is None else int((self.offsets.diff() > 0).sum())


def dense(tokens: int, device: torch.device, layers: Sequence[Layer] = BLOCK) -> Problem:
    return Problem(layers, tokens, _inputs(tokens, layers, device))


def experts(tokens: int, device: torch.device) -> Problem:
    """Every token draws its experts at random; rows are sorted by expert."""
    chosen = torch.rand(tokens, EXPERTS, device=device).topk(TOP_K).indices
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
    offsets = F.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    return Problem(EXPERT_BLOCK, tokens, _inputs(tokens * TOP_K, EXPERT_BLOCK, device), offsets)


def _inputs(rows: int, layers: Sequence[Layer], device: torch.device) -> dict[int, Tensor]:
    widths = {K for _, _, K in layers}
    return {K: torch.randn(rows, K, device=device, dtype=torch.bfloat16) for K in widths}


Weights = list[tuple[Tensor, ...]]  # a layer's tensors


def make_weights(contender: Contender, layers: Sequence[Layer], num_experts: int, device: torch.device) -> Weights:
    """Random ones. Experts: a stack of them."""
    lead = (num_experts,) if num_experts else ()
    shapes = [(*lead, N, K) for _, N, K in layers]
    return [contender.encode_weight(torch.randn(shape, device=device) * 0.02) for shape in shapes]


def rotated(weights: Weights, used: float) -> list[Weights]:
    """Copies, enough that one is out of the cache when its turn comes again. `used`: the share of it that is read."""
    copies = max(2, round(ROTATED_BYTES / (num_bytes(weights) * used) + 0.5))
    return [weights, *([tuple(t.clone() for t in layer) for layer in weights] for _ in range(copies - 1))]


def num_bytes(weights: Weights) -> int:
    return sum(tensor.numel() * tensor.element_size() for layer in weights for tensor in layer)


def run_pass(contender: Contender, problem: Problem, weights: Weights, rows: dict[int, Any] | None = None) -> None:
    """Every layer once. Each encodes its own input, as the layers of a model do, unless `rows` holds them encoded."""
    for (_, _, K), weight in zip(problem.layers, weights, strict=True):
        x = rows[K] if rows else contender.encode_rows(problem.inputs[K])
        if problem.offsets is None:
            contender.product(*x, *weight, torch.bfloat16)
        else:
            contender.grouped(*x, problem.offsets, *weight, torch.bfloat16)


def seconds_per_pass(
    contender: Contender, problem: Problem, copies: Sequence[Weights], *, encode: bool = True
) -> float:
    """Of a pass over one copy, in a graph that passes over all of them."""
    rows = None if encode else {K: contender.encode_rows(x) for K, x in problem.inputs.items()}
    return graph_seconds([partial(run_pass, contender, problem, weights, rows) for weights in copies])


def graph_seconds(passes: Sequence[Callable[[], object]]) -> float:
    """Of one pass: the median over replays of a graph that runs each of them once."""
    passes[0]()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in passes:
            run()
    for _ in range(3):
        graph.replay()
    return median(_replay_times(graph)) / len(passes)


def _replay_times(graph: torch.cuda.CUDAGraph) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


@dataclass(frozen=True, slots=True)
class Measured:
    contender: str
    tokens: int
    seconds: float
    encoded_seconds: float  # the same with rows already encoded
    limit: float  # to read the weights once


def measure(problems: Sequence[Problem], device: torch.device) -> Iterator[Measured]:
    """All contenders, one problem after the other: many rows heat the device, and slow down what is measured next."""
    for problem, contender in product(problems, contenders()):
        num_experts = 0 if problem.offsets is None else EXPERTS
        weights = make_weights(contender, problem.layers, num_experts, device)
        used = problem.used / max(1, num_experts)
        copies = rotated(weights, used)
        seconds, encoded = (seconds_per_pass(contender, problem, copies, encode=e) for e in (True, False))
        yield Measured(contender.name, problem.tokens, seconds, encoded, num_bytes(weights) * used / BYTES_PER_S)


def table(results: Sequence[Measured]) -> str:
    """Markdown, one block of lines per number of tokens."""
    lines = [
        "| rows | format | µs | µs, input already encoded | µs to read the weights | of the limit | × bf16 |",
        "|---|---|---|---|---|---|---|",
    ]
    base = {r.tokens: r.seconds for r in results if r.contender == "bf16"}
    lines += [
        f"| {r.tokens} | {r.contender} | {r.seconds * 1e6:.1f} | {r.encoded_seconds * 1e6:.1f} | {r.limit * 1e6:.1f} "
        f"| {r.limit / r.seconds:.0%} | {base[r.tokens] / r.seconds:.2f} |"
        for r in results
    ]
    return "\n".join(lines)


def tables(tokens: Sequence[int], device: torch.device) -> dict[str, str]:
    """One per problem, by its title."""
    cases = {
        "The linear layers of one Qwen3-8B block, q, k, v in one and gate, up in one: four": FUSED_BLOCK,
        "The same as the model has them: seven": BLOCK,
    }
    problems = {title: [dense(n, device, layers) for n in tokens] for title, layers in cases.items()}
    problems["Experts of one Qwen3-30B-A3B block"] = [experts(n, device) for n in tokens]
    with torch.no_grad():
        return {title: table(list(measure(given, device))) for title, given in problems.items()}


def gpu() -> torch.device:
    if not torch.cuda.is_available():
        raise ConfigError("`lockstep bench linear` measures GPU kernels, and there is no CUDA device here")
    torch.manual_seed(0)
    return torch.device("cuda")


def show(tables: Mapping[str, str], out: Path | None, console: Console) -> None:
    """Prints tables under their titles, and puts them into the page `out`."""
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    console.print("\n\n".join([device, *map("\n\n".join, tables.items())]), markup=False, soft_wrap=True)
    if out:
        out.write_text(with_tables(out.read_text() if out.exists() else f"{device}\n", tables))


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """The page with each table in place of the one under its heading `### TITLE`, or under a new one at the end."""
    for title, fresh in tables.items():
        before, heading, after = page.partition(f"### {title}\n")
        if heading:
            section = re.split(r"^#", after, maxsplit=1, flags=re.MULTILINE)[0]
            old = re.search(r"^(\|.*\n?)+", section, re.MULTILINE)
            if old is None:
                raise ConfigError(f"there is no table under the heading {title!r}: remove the heading, or give it one")
            page = f"{before}{heading}{after[: old.start()]}{fresh}\n{after[old.end() :]}"
        else:
            page = f"{page.rstrip()}\n\n### {title}\n\n{fresh}\n"
    return page
