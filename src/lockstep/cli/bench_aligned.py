"""The learner's side of low-bit linear layers on one GPU: forward and backward of the seven linear layers of a
Qwen3-8B block, straight-through on the codes that the engine samples with, against the same in bfloat16.

Counted: in the forward, encoding each layer's own input and the low-bit product; in the backward, decoding inputs and
weights and both bfloat16 products. Apart from that: quantizing the float32 masters, once per update. Not counted: what
both sides have in common, such as attention, norms, the head and the optimiser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from lockstep.cli.bench_linear import BLOCK, formats, gpu, show
from lockstep.quant import straight_through
from lockstep.quant.encoded import Encoded
from lockstep.quant.format import Format

REPEATS = 12


@dataclass(frozen=True, slots=True)
class Step:
    """Of one block."""

    name: str
    rows: int
    forward_backward: float  # seconds
    quantize: float  # seconds per update
    in_bf16: float  # seconds

    @property
    def ratio(self) -> float:
        return self.forward_backward / self.in_bf16

    @property
    def ratio_with_update(self) -> float:
        """If every forward and backward were an update of its own."""
        return (self.forward_backward + self.quantize) / self.in_bf16


def measure(rows: Sequence[int], device: torch.device) -> Iterator[Step]:
    masters = [torch.randn(N, K, device=device).mul_(0.02) for _, N, K in BLOCK]
    weights = [master.bfloat16().requires_grad_() for master in masters]
    for num_rows in rows:
        inputs, grads = _inputs(num_rows, device)
        in_bf16 = _seconds(partial(_train, F.linear, inputs, grads, [(weight,) for weight in weights]))
        for name, format in formats().items():
            yield _step(name, format, masters, weights, inputs, grads, in_bf16)


def _step(
    name: str,
    format: Format,
    masters: Sequence[Tensor],
    weights: Sequence[Tensor],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    in_bf16: float,
) -> Step:
    encoded = [format.encode_weight(master) for master in masters]
    pairs = list(zip(weights, encoded, strict=True))

    def linear(x: Tensor, weight: Tensor, codes: Encoded) -> Tensor:
        return straight_through.linear(x, weight, None, codes, format)

    trained = _seconds(lambda: _train(linear, inputs, grads, pairs))
    quantized = _seconds(
        lambda: [codes.copy_(format.encode_weight(m)) for codes, m in zip(encoded, masters, strict=True)]
    )
    return Step(name, len(inputs[0]), trained, quantized, in_bf16)


def _inputs(rows: int, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    def random(width: int) -> Tensor:
        return torch.randn(rows, width, device=device, dtype=torch.bfloat16)

    by_width = {K: random(K).requires_grad_() for K in {K for _, _, K in BLOCK}}
    return [by_width[K] for _, _, K in BLOCK], [random(N) for _, N, _ in BLOCK]


def _train(
    linear: Callable[..., Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor], weights: Sequence[tuple[Any, ...]]
) -> None:
    """Layer by layer. Gradients are dropped, so that none is added to another."""
    for x, dy, weight in zip(inputs, grads, weights, strict=True):
        torch.autograd.grad(linear(x, *weight), (x, weight[0]), dy)


def _seconds(run: Callable[[], object]) -> float:
    for _ in range(3):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) / 1e3 for a, b in pairwise(marks))


def table(steps: Sequence[Step]) -> str:
    lines = [
        "| rows | format | bf16 ms | aligned ms | × bf16 | quantize, ms per update | × bf16, an update each time |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {s.rows} | {s.name} | {s.in_bf16 * 1e3:.2f} | {s.forward_backward * 1e3:.2f} | {s.ratio:.2f} "
        f"| {s.quantize * 1e3:.2f} | {s.ratio_with_update:.2f} |"
        for s in steps
    ]
    return "\n".join(lines)


def compare(rows: Sequence[int], out: Path | None, console: Console) -> None:
    """Prints the table, and writes it to `out`."""
    steps = list(measure(rows, gpu()))
    show({"Forward and backward of the linear layers of one Qwen3-8B block": table(steps)}, out, console)
