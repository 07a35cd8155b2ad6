"""Finds the tiles of quant/kernels/triton_configs.py: `python -m lockstep.cli.tune_linear` on the GPU to tune for.

Every candidate runs the passes of `lockstep bench linear`, activations encoded in each. Prints the fastest per format
and number of rows. Kernels are compiled by several processes first, into Triton's cache.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context

import torch

from lockstep.cli import bench_linear as bench
from lockstep.quant.kernels import triton_configs as configs
from lockstep.quant.kernels import triton_tiles as tiles
from lockstep.quant.kernels.triton_tiles import Tile

KINDS = {"int8": "int8_w8a8", "fp8": "fp8_w8a8", "w4a16": "w4a16", "w4a8": "w4a8, int8"}
FILLS = (384, 768)
ROWS = (16, 64, 256, 2048)  # the last as a learner has them, without experts
SHOWN = 6
Job = tuple[str, int, int, Tile]  # kind, tokens, experts, tile


def candidates(tokens: int, num_experts: int) -> list[Tile]:
    """Tiles worth trying. Those that do not fit into registers or shared memory are passed over when they fail."""
    narrow, wide = (64, 4), (128, 8)  # outputs, warps
    if num_experts:
        heights = (16, 32, 64) if tokens == 256 else (16,)
        shapes = product(heights, (narrow, (128, 4), wide), (4, 6))
        return [Tile(rows, outputs, warps, stages, False) for rows, (outputs, warps), stages in shapes]
    if tokens >= 256:
        shapes = product((64, 128, 256), (narrow, wide), (3, 4), (False,))
        split = product((128,), (narrow, wide), (3,), (True,))
        return [Tile(rows, outputs, warps, stages, p) for rows, (outputs, warps), stages, p in (*shapes, *split)]
    shapes = product((narrow, (128, 4), wide), (3, 4, 6), (False, True))
    return [Tile(tokens, outputs, warps, stages, True, prefetch) for (outputs, warps), stages, prefetch in shapes]


def use(kind: str, num_experts: int, tile: Tile) -> None:
    (configs.GROUPED if num_experts else configs.DENSE)[kind] = {configs.ANY: tile}


def contender_of(kind: str) -> bench.Contender:
    return next(c for c in bench.contenders() if c.name == KINDS[kind])


def compile_kernel(job: Job) -> str | None:
    """In a process of its own: one small product. Returns why a tile cannot run."""
    kind, tokens, num_experts, tile = job
    use(kind, num_experts, tile)
    device, contender = torch.device("cuda"), contender_of(kind)
    layer = ("", 1024, 4096 if not num_experts else 256)
    offsets = torch.arange(num_experts + 1, dtype=torch.int32, device=device) if num_experts else None
    rows = num_experts or tokens
    inputs = {layer[2]: torch.randn(rows, layer[2], device=device).bfloat16()}
    problem = bench.Problem("", [layer], tokens, inputs, offsets)
    try:
        bench.run_pass(contender, problem, bench.make_weights(contender, [layer], num_experts, device))
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:80]}"
    return None


def compile_all(jobs: list[Job]) -> set[Job]:
    """Fills Triton's cache. Returns the jobs whose tile cannot run."""
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2), get_context("spawn")) as pool:
        reasons = dict(zip(jobs, pool.map(compile_kernel, jobs, chunksize=2), strict=True))
    failed = {job for job, reason in reasons.items() if reason}
    for job in failed:
        print("cannot run", job, reasons[job])
    return failed


def all_jobs() -> list[Job]:
    cases = [*product(KINDS, ROWS, (0,)), *product(KINDS, ROWS[:-1], (bench.EXPERTS,))]
    return [(*case, tile) for case in cases for tile in candidates(case[1], case[2])]


def tune(kind: str, tokens: int, num_experts: int, tried: list[Tile]) -> list[tuple[float, int, Tile]]:
    """Seconds of a pass, fill and tile, the fastest first."""
    device, contender = torch.device("cuda"), contender_of(kind)
    torch.manual_seed(tokens)
    problem = bench.experts(tokens, device) if num_experts else bench.dense(tokens, device)
    weights = bench.make_weights(contender, problem.layers, num_experts, device)
    copies = bench.rotated(weights, problem.used / max(1, num_experts))
    found = []
    for tile, fill in product(tried, FILLS[:1] if num_experts else FILLS):
        use(kind, num_experts, tile)
        tiles.FILL = fill
        found.append((bench.seconds_per_pass(contender, problem, copies), fill, tile))
    return sorted(found, key=lambda result: result[0])


def main() -> None:
    jobs = all_jobs()
    failed = compile_all(jobs)
    for kind, tokens, num_experts in dict.fromkeys(job[:3] for job in jobs):
        tried = [job[3] for job in jobs if job[:3] == (kind, tokens, num_experts) and job not in failed]
        with torch.no_grad():
            results = tune(kind, tokens, num_experts, tried)
        for seconds, fill, tile in results[:SHOWN]:
            print(
                f"{kind:6} {num_experts:3} experts {tokens:4} rows {seconds * 1e6:7.1f} µs  fill {fill}  {tile}",
                flush=True,
            )


if __name__ == "__main__":
    main()
