"""What the learner's attention takes, forward and backward, against PyTorch's flash attention: on a GPU, in bfloat16.

    python scripts/attention_time.py

Prints a table for docs/benchmarks/mismatch.md, medians in ms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from triton.testing import do_bench  # pyright: ignore[reportMissingImports]

from lockstep.models import varlen


class Shape(NamedTuple):
    sequences: int
    tokens: int
    heads: int
    key_heads: int
    size: int


SHAPES = (
    Shape(256, 40, 4, 4, 32),
    Shape(64, 384, 16, 8, 128),
    Shape(16, 1024, 32, 8, 128),
    Shape(8, 2560, 16, 8, 128),
    Shape(4, 4096, 32, 8, 128),
    Shape(1, 16384, 32, 8, 128),
)


def milliseconds(attend: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> float:
    gradient = torch.randn_like(inputs[0])
    return do_bench(lambda: torch.autograd.grad(attend(), inputs, gradient), warmup=10, rep=40, return_mode="median")


def measure(shape: Shape) -> tuple[float, float]:
    """Flash attention's, and ours."""
    torch.manual_seed(0)
    num_tokens, scale = shape.sequences * shape.tokens, shape.size**-0.5
    inputs = tuple(
        torch.randn(num_tokens, heads, shape.size, device="cuda").bfloat16().requires_grad_()
        for heads in (shape.heads, shape.key_heads, shape.key_heads)
    )
    ends = torch.arange(0, num_tokens + 1, shape.tokens, device="cuda", dtype=torch.int32)
    packed = varlen.Packed(cu_seqlens=ends, max_seqlen=shape.tokens)
    flash = milliseconds(lambda: varlen._fused(*inputs, packed, scale, None), inputs)
    return flash, milliseconds(lambda: varlen._AsTheEngine.apply(*inputs, packed, scale, None, False), inputs)


def main() -> None:
    print("| sequences x tokens, heads / key heads x size | flash | ours |\n|---|---|---|")
    for shape in SHAPES:
        flash, ours = measure(shape)
        lengths, heads = f"{shape.sequences} x {shape.tokens:,}", f"{shape.heads} / {shape.key_heads} x {shape.size}"
        print(f"| {lengths}, {heads} | {flash:.3f} | {ours:.3f} |", flush=True)


if __name__ == "__main__":
    main()
