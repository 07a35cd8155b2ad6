"""What the low-bit matmul kernels share: which tile a program computes, and how partial sums of K become outputs.

K is cut into `chunks`, a number that depends on the format and K alone. Each chunk is summed on its own, and the
chunks' sums are added left to right. Few tiles: every chunk has its own program, so that small problems fill the
device, and the last program to finish a tile adds up what all of them left in memory. Many tiles: one program runs the
chunks in turn. Both add the same numbers in the same order, without atomics on sums: a result does not depend on the
rows beside it, or on how many there are, or on what other weights are stacked on its own.

Shapes: M rows, K inputs, N outputs, E experts.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.quant.kernels.counters import MOST, counters

GROUP = 128  # of K: what shares a scale in 4-bit weights and fp8 blocks, and what one step of a kernel's loop covers
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # on a CPU: no inline assembly, no dependent launch
_HOPPER = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)
# Hopper alone multiplies by groups of four warps. Without a GPU kernels are only compiled, for a Hopper.
WARP_GROUPS = not INTERPRETED and (not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] == 9)
DEPENDENT = _HOPPER and not INTERPRETED  # kernels are launched while their inputs are still being made, and wait
MULTIPROCESSORS = 132  # of an H200
_FULL = 150  # tiles that keep the device busy: where there are fewer, chunks run side by side
assert _FULL <= MOST, "each of them is counted"
_ALIGNED = 2 * GROUP  # chunks start at multiples of it
_AHEAD = 4 << 20  # bytes of a weight that a launch fetches while it awaits its inputs


@dataclass(frozen=True, slots=True)
class Tile:
    """How a kernel is compiled for a range of row counts. No field of it changes a result."""

    rows: int
    outputs: int
    warps: int
    stages: int  # steps of K loaded ahead, plus one
    groups: int = 1  # w4a16: of 128 values of K in a step, where K is a multiple of so many
    lone_stages: int = 0  # the stages where a multiprocessor has no second program to hide its waiting; 0: as many


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch: the compiled tile, the grid, and the memory in which chunks meet."""

    tile: Tile
    chunks: int
    chunk: int  # values of K in each but the last
    row_tiles: int
    output_tiles: int
    experts: int  # 0: one weight for all rows
    parallel: bool  # chunks side by side rather than in turn
    even: bool  # every step of the loop lies within K

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.row_tiles, self.output_tiles, self.chunks if self.parallel else 1

    @property
    def programs(self) -> int:
        return math.prod(self.grid)

    @property
    def ahead(self) -> int:
        """Bytes of an output's weights that a program fetches while it awaits its inputs."""
        return min(self.chunk, _AHEAD // (self.programs * self.tile.outputs))

    @property
    def stages(self) -> int:
        lone = self.programs <= MULTIPROCESSORS
        return self.tile.lone_stages or self.tile.stages if lone else self.tile.stages

    @property
    def constants(self) -> dict[str, int | bool]:
        """Compile-time arguments that every kernel takes."""
        tile = self.tile
        return {
            "BM": tile.rows,
            "BN": tile.outputs,
            "PARALLEL": self.parallel,
            "IN_TURN": self.chunks > 1 and not self.parallel,
            "EXPERTS": 1 << (self.experts - 1).bit_length() if self.experts else 0,
            "num_warps": tile.warps,
            "STAGES": self.stages,
            "EVEN": self.even,
            "enable_fp_fusion": False,  # a product and a sum round the same in every compilation
        }

    def meeting_place(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Memory for the chunks' sums, and counters of the chunks that have arrived."""
        if not self.parallel:
            return None, None
        tiles = self.row_tiles * self.output_tiles
        size = tiles * self.chunks * self.tile.rows * self.tile.outputs
        return torch.empty(size, dtype=dtype, device=device), counters(device)


@cache
def multiprocessors(device: torch.device) -> int:
    """Without a GPU, as where kernels are only compiled: an H200's."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else MULTIPROCESSORS


def cdiv(a: int, b: int) -> int:
    """Rounded up. Triton's own takes ten times as long on the host, for it is also a kernel's."""
    return -(-a // b)


def power_of_2(number: int) -> int:
    """The next one that is not smaller. Triton's own is as slow."""
    return 1 << max(0, number - 1).bit_length()


def chunk_of(K: int, chunks: int) -> int:
    """Values of K in each of at most `chunks` parts, but for the last, which may have fewer."""
    return cdiv(cdiv(K, _ALIGNED), max(1, chunks)) * _ALIGNED


def make_plan(tile: Tile, chunks: int, M: int, N: int, K: int, experts: int = 0, exact: bool = False) -> Plan:
    """Experts have enough tiles without chunks. `exact` sums need chunks only where they run side by side."""
    tile = tile if K % (GROUP * tile.groups) == 0 else replace(tile, groups=1)
    row_tiles = cdiv(M, tile.rows)
    if experts:
        row_tiles = min(M, experts + M // tile.rows)  # the most there can be, however rows fall: known without waiting
    output_tiles = cdiv(N, tile.outputs)
    few = row_tiles * output_tiles <= _FULL
    chunks = 1 if experts or (exact and not few) else chunks
    chunk = chunk_of(K, chunks)
    chunks = cdiv(K, chunk)
    even = K % GROUP == 0
    return Plan(tile, chunks, chunk, row_tiles, output_tiles, experts, few and chunks > 1, even)


@triton.jit
def await_inputs(DEPENDENT: tl.constexpr):
    """Until the kernel before has ended. Nothing may be read or written before this."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def let_next_start(DEPENDENT: tl.constexpr):
    """The next kernel, if it awaits its inputs, may now be launched: that hides the time its launch takes."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def fetch_ahead(rows, num_bytes):
    """Brings the first bytes behind pointers [W] into the L2 cache, as far as they fill steps of two groups.

    Allowed before inputs are awaited, whoever may still write there: writes go to the same cache. In the order in which
    the loop reads them, and not by bulk copies, which are slow at pieces as small as an output has in a group.
    """
    groups = tl.arange(0, 2)[None, :] * 128
    for done in range(0, num_bytes - 255, 256):
        places = (rows[:, None] + (done + groups)).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def locate(offsets, M, experts, BM: tl.constexpr, EXPERTS: tl.constexpr):
    """This program's expert, first row and end of rows. Without a tile to compute, the first row is at the end."""
    tile = tl.program_id(0)
    if EXPERTS == 0:
        expert = tile * 0
        first = tile * BM
        end = M
    else:
        e = tl.arange(0, EXPERTS)
        counts = tl.load(offsets + e + 1, e < experts, 0) - tl.load(offsets + e, e < experts, 0)
        tiles = (counts + BM - 1) // BM
        expert = tl.minimum(tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0), experts - 1)
        before = tl.sum(tl.where(e < expert, tiles, 0), 0)
        end = tl.load(offsets + expert + 1)
        first = tl.minimum(tl.load(offsets + expert) + (tile - before) * BM, end)
    return expert.to(tl.int64), first, end


@triton.jit
def finish(
    acc, y, sx, sw, rows, end, outputs, N, partials, counters, chunks,
    BM: tl.constexpr, BN: tl.constexpr, PARALLEL: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Writes the tile [BN, BM]. In parallel: leaves this chunk's sum, and the last one to arrive adds all of them."""
    if PARALLEL:
        tile = tl.program_id(0) + tl.num_programs(0) * tl.program_id(1)
        place = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        sums = partials + tile.to(tl.int64) * chunks * (BN * BM) + place
        tl.store(sums + tl.program_id(2) * (BN * BM), acc)
        tl.debug_barrier()  # every thread's part is written before the arrival is announced
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") == chunks - 1:
            total = tl.zeros_like(acc)
            for chunk in tl.range(0, chunks, loop_unroll_factor=2):  # two are on their way at the same time
                total += tl.load(sums + chunk * (BN * BM), cache_modifier=".cg")
            tl.store(counters + tile, 0)
            _write(total, y, sx, sw, rows, end, outputs, N, SCALED)
    else:
        _write(acc, y, sx, sw, rows, end, outputs, N, SCALED)


@triton.jit
def _write(acc, y, sx, sw, rows, end, outputs, N, SCALED: tl.constexpr):
    """y = (acc·sx)·sw in float32, then the cast. SCALED: "none", "rows" (sx alone) or "both"."""
    value = acc.to(tl.float32)
    if SCALED != "none":
        value = value * tl.load(sx + rows, rows < end, 0.0)[None, :]
    if SCALED == "both":
        value = value * tl.load(sw + outputs, outputs < N, 0.0)[:, None]
    mask = (rows < end)[None, :] & (outputs < N)[:, None]
    tl.store(y + rows.to(tl.int64)[None, :] * N + outputs[:, None], value.to(y.dtype.element_ty), mask)
