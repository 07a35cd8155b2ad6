"""How the tiles of `gluon_four` are dealt out to the multiprocessors: by a rule that looks at M, N, K and the device.

As many tiles as go round evenly are computed whole. The steps of the rest, laid one after the other along K, are cut
into equal shares, one for each program.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from lockstep.quant.kernels.triton_configs import WideTile
from lockstep.quant.kernels.triton_tiles import GROUP, cdiv

MOST_PIECES = 6  # of a tile, or one more: a single program adds them up


@dataclass(frozen=True, slots=True)
class Deal:
    """Who computes what."""

    row_tiles: int
    programs: int
    rounds: int  # tiles that each program computes whole
    rest: int  # steps of the tiles that remain
    share: int  # of these, of each program
    cut: bool  # some of them have pieces
    longest: int  # steps of the program that has most


def deal(tile: WideTile, M: int, N: int, K: int, processors: int) -> Deal:
    """The program that has most to do is what counts; where a little more ends with a tile, fewer pieces meet."""
    row_tiles, steps = cdiv(M, tile.all_rows), K // GROUP
    rounds, left = divmod(row_tiles * cdiv(N, tile.outputs), processors)
    shortest = max(cdiv(left * steps, processors), cdiv(steps, MOST_PIECES))
    share = next((some for some in range(shortest, shortest * 9 // 8 + 1) if steps % some == 0), shortest)
    programs = processors if rounds else cdiv(left * steps, share)
    cut, longest = left > 0 and share < steps, rounds * steps + (share if left else 0)
    return Deal(row_tiles, programs, rounds, left * steps, share, cut, longest)


@cache
def choose(tiles: tuple[WideTile, ...], M: int, N: int, K: int, processors: int) -> tuple[WideTile, Deal]:
    """The first of the tiles, unless a larger one takes no longer and is not cut: it reads rows less often."""
    chosen, work = tiles[0], deal(tiles[0], M, N, K, processors)
    for tile in tiles[1:]:
        other = deal(tile, M, N, K, processors)
        if not other.cut and other.longest * tile.outputs <= work.longest * chosen.outputs:
            chosen, work = tile, other
    return chosen, work
