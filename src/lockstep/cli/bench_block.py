"""The linear layers of a Qwen3-8B block with what makes their inputs, as the embedded engine runs them, on one GPU.

Sum and norm, q/k/v, o, sum and norm, gate/up, gate, down: in every format and in bfloat16, by the same kernels but for
the products. Attention, which a model has between q/k/v and o, is left out: no format changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.cli.bench_linear import FUSED_BLOCK, Weights, contenders, formats, graph_seconds, make_weights, rotated
from lockstep.quant.encoded import Encoded
from lockstep.quant.format import Format
from lockstep.quant.inputs import InputCode

EPS = 1e-6
HIDDEN = 4096

Linear = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Stream:
    """What reaches a block, [rows, HIDDEN] each: the last one's result and residual, and what attention will give."""

    computed: Tensor
    residual: Tensor
    attended: Tensor
    norm: Tensor  # a norm's weight [HIDDEN]


def stream(rows: int, device: torch.device) -> Stream:
    computed, residual, attended = torch.randn(3, rows, HIDDEN, device=device, dtype=torch.bfloat16)
    return Stream(computed, residual, attended, torch.ones(HIDDEN, device=device, dtype=torch.bfloat16))


def linears(format: Format | None, weights: Weights) -> list[Linear]:
    """The layers of FUSED_BLOCK; None: in bfloat16."""
    if format is None:
        return [partial(F.linear, weight=weight) for (weight,) in weights]
    shapes = ((N, K) for _, N, K in FUSED_BLOCK)
    encoded = (Encoded(codes, scales, shape) for (codes, scales), shape in zip(weights, shapes, strict=True))
    return [partial(format.linear, weight=weight) for weight in encoded]


def run_block(layers: Sequence[Linear], given: Stream, code: InputCode | None) -> Tensor:
    """Its result. Inputs that norms and gate make are encoded there; without a code, by the layers that read them."""
    from lockstep.models.kernels.pointwise import add_rms_norm, gated_silu

    qkv, o, gate_up, down = layers
    residual, x = add_rms_norm(given.computed, given.residual, given.norm, EPS, code)
    qkv(x)
    _, x = add_rms_norm(o(given.attended), residual, given.norm, EPS, code)
    return down(gated_silu(gate_up(x), code))


@dataclass(frozen=True, slots=True)
class Measured:
    contender: str
    rows: int
    seconds: float
    apart_seconds: float  # the same with every input encoded by a kernel of its own


def measure(tokens: Sequence[int], device: torch.device) -> Iterator[Measured]:
    """Few rows first: many heat the device, and slow down what is measured next."""
    for rows, contender in product(tokens, contenders()):
        format, given = formats().get(contender.name), stream(rows, device)
        copies = rotated(make_weights(contender, FUSED_BLOCK, 0, device), used=1)
        blocks = [linears(format, weights) for weights in copies]
        codes = (format.input_code if format else None, None)
        seconds, apart = (graph_seconds([partial(run_block, block, given, c) for block in blocks]) for c in codes)
        yield Measured(contender.name, rows, seconds, apart)


def table(results: Sequence[Measured]) -> str:
    """Markdown, one block of lines per number of rows."""
    lines = [
        "| rows | format | µs | × bf16 | µs, inputs encoded by kernels of their own | × bf16 |",
        "|---|---|---|---|---|---|",
    ]
    base = {r.rows: r.seconds for r in results if r.contender == "bf16"}
    lines += [
        f"| {r.rows} | {r.contender} | {r.seconds * 1e6:.1f} | {base[r.rows] / r.seconds:.2f} "
        f"| {r.apart_seconds * 1e6:.1f} | {base[r.rows] / r.apart_seconds:.2f} |"
        for r in results
    ]
    return "\n".join(lines)


def tables(tokens: Sequence[int], device: torch.device) -> dict[str, str]:
    """The one there is, by its title."""
    with torch.no_grad():
        return {"One Qwen3-8B block as the engine runs it, without attention": table(list(measure(tokens, device)))}
