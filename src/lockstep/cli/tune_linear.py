"""Finds the tiles of quant/kernels/triton_configs.py: `python -m lockstep.cli.tune_linear` on the GPU to tune for.

Every candidate runs the passes of `lockstep bench linear` over stacked layers and over experts, which encode their
inputs. Prints the fastest per format and number of rows. Kernels are compiled by several processes first, into Triton's
cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context

import torch

from lockstep.cli import bench_linear as bench
from lockstep.quant.kernels import triton_configs as configs
from lockstep.quant.kernels.triton_tiles import Tile

KINDS = {"int8": "int8_w8a8", "fp8": "fp8_w8a8", "w4a16": "w4a16", "w4a8": "w4a8, int8"}
SHOWN = 6
Case = tuple[str, int, int]  # kind, tokens, experts
Job = tuple[str, int, int, Tile]


def cases() -> Iterator[Case]:
    """The last number of rows is a learner's. Above LIBRARY_ABOVE, MANY_ABOVE and WIDE_ABOVE no tile runs."""
    for kind in KINDS:
        most = (configs.LIBRARY_ABOVE | configs.MANY_ABOVE | configs.WIDE_ABOVE).get(kind, 2048)
        yield from product((kind,), (rows for rows in (16, 32, 64, 128, 256, 2048) if rows <= most), (0,))
        yield from product((kind,), (16, 64, 256, 2048), (bench.EXPERTS,))


def candidates(kind: str, tokens: int, num_experts: int) -> list[Tile]:
    """Tiles worth trying. Those that do not fit into registers or shared memory are passed over when they fail."""
    rows = max(1, tokens * bench.TOP_K // num_experts) if num_experts else tokens
    heights = (16,) if rows <= 8 else (16, 32) if rows <= 16 else tuple(h for h in (32, 64, 128, 256) if h <= rows)
    if kind.startswith("w4"):
        shapes, stages = ((64, 4), (128, 4), (128, 8)), (3, 4, 5)
        groups = (1, 2) if kind == "w4a16" and rows <= 64 else (1,)
        return [Tile(h, *shape, s, groups=g) for h, shape, s, g in product(heights, shapes, stages, groups)]
    shapes = ((64, 4), (128, 8)) if rows <= 512 else ((64, 4), (128, 8), (256, 8))
    stages = ((3, 0), (4, 8), (6, 8), (6, 10))
    return [Tile(h, *shape, s, lone_stages=lone) for h, shape, (s, lone) in product(heights, shapes, stages)]


def use(kind: str, num_experts: int, tile: Tile) -> None:
    (configs.GROUPED if num_experts else configs.DENSE)[kind] = {configs.ANY: tile}


def contender_of(kind: str) -> bench.Contender:
    return next(c for c in bench.contenders() if c.name == KINDS[kind])


def compile_kernel(job: Job) -> str | None:
    """In a process of its own: one small product. Returns why a tile cannot run."""
    kind, tokens, num_experts, tile = job
    use(kind, num_experts, tile)
    device, contender = torch.device("cuda"), contender_of(kind)
    layer = ("", 1024, 256 if num_experts else 4096)
    offsets = torch.arange(num_experts + 1, dtype=torch.int32, device=device) if num_experts else None
    inputs = {layer[2]: torch.randn(num_experts or tokens, layer[2], device=device).bfloat16()}
    problem = bench.Problem([layer], tokens, inputs, offsets)
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


def tune(case: Case, tried: list[Tile]) -> list[tuple[float, Tile]]:
    """Seconds of a pass and tile, the fastest first."""
    kind, tokens, num_experts = case
    device, contender = torch.device("cuda"), contender_of(kind)
    torch.manual_seed(tokens)
    problem = bench.experts(tokens, device) if num_experts else bench.dense(tokens, device, bench.FUSED_BLOCK)
    weights = bench.make_weights(contender, problem.layers, num_experts, device)
    copies = bench.rotated(weights, problem.used / max(1, num_experts))
    found = []
    for tile in tried:
        use(kind, num_experts, tile)
        found.append((bench.seconds_per_pass(contender, problem, copies), tile))
    return sorted(found, key=lambda result: result[0])


def main() -> None:
    jobs = [(*case, tile) for case in cases() for tile in candidates(*case)]
    failed = compile_all(jobs)
    for case in cases():
        with torch.no_grad():
            results = tune(case, [job[3] for job in jobs if job[:3] == case and job not in failed])
        for seconds, tile in results[:SHOWN]:
            print(f"{case[0]:6} {case[2]:3} experts {case[1]:4} rows {seconds * 1e6:7.1f} µs  {tile}", flush=True)


if __name__ == "__main__":
    main()
