"""How the matmul kernels are compiled, by format and number of rows: a fixed table, so that nothing is tuned at run
time. Found on an H200; DENSE and GROUPED with `python -m lockstep.cli.tune_linear`, which prints the fastest tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.quant.kernels.triton_tiles import WARP_GROUPS, Tile

ANY = 1 << 40
LIBRARY_ABOVE = {"fp8": 128, "w4a16": 256}  # rows from which a library's product is faster; w4a16 decodes for it
MANY_ABOVE = {"fp8_block": 128, "w4a8": 512}  # rows from which the kernels of `gluon_many` are, for one weight
WIDE_ABOVE = {"w4a16": 64}  # rows from which `gluon_four` is, for one weight in bfloat16


@dataclass(frozen=True, slots=True)
class ManyTile:
    """How `gluon_many` is compiled. No field of it changes a result."""

    rows: int
    outputs: int
    stages: int  # steps of K loaded ahead


@dataclass(frozen=True, slots=True)
class WideTile:
    """How `gluon_four` is compiled: weights are decoded once for both numbers of rows, which are powers of two.

    How large a tile is changes how K is cut; the stages change no result.
    """

    rows: int
    more_rows: int
    stages: int  # steps of K loaded ahead
    groups: int  # of warps

    @property
    def all_rows(self) -> int:
        return self.rows + self.more_rows

    @property
    def outputs(self) -> int:
        return self.groups * 64


# Up to so many rows → tile.
DENSE: dict[str, dict[int, Tile]] = {
    "int8": {
        16: Tile(16, 64, 4, 6, lone_stages=8),
        32: Tile(32, 64, 4, 5, lone_stages=9),
        64: Tile(64, 64, 4, 4, lone_stages=8),
        512: Tile(128, 64, 4, 4),
        ANY: Tile(256, 128, 8, 3),
    },
    "fp8": {
        16: Tile(16, 64, 4, 6, lone_stages=8),
        32: Tile(32, 64, 4, 5, lone_stages=9),
        64: Tile(64, 64, 4, 4, lone_stages=8),
        512: Tile(128, 64, 4, 4),
        ANY: Tile(128, 128, 8, 3),
    },
    "w4a16": {
        16: Tile(16, 64, 4, 3, groups=2),
        32: Tile(32, 64, 4, 3, groups=2),
        64: Tile(64, 64, 4, 3),
        ANY: Tile(128, 64, 4, 3),
    },
    "w4a8": {
        16: Tile(16, 64, 4, 5),
        32: Tile(32, 64, 4, 5),
        64: Tile(64, 64, 4, 4),
        ANY: Tile(128, 64, 4, 3),
    },
}
# One 8-bit weight: where tiles of so many rows leave half of the device idle → tiles of half as many. Two programs read
# the same weights then, but less passes through each multiprocessor.
HALVES: dict[int, Tile] = {
    64: Tile(32, 64, 4, 5, lone_stages=13),
}
# Up to so many rows per expert, on average → tile.
GROUPED: dict[str, dict[int, Tile]] = {
    "int8": {
        8: Tile(16, 128, 4, 3),
        32: Tile(32, 64, 4, 3),
        ANY: Tile(64, 128, 8, 4),
    },
    "fp8": {
        8: Tile(16, 64, 4, 4),
        32: Tile(32, 64, 4, 3),
        ANY: Tile(64, 128, 8, 4),
    },
    "w4a16": {
        8: Tile(16, 64, 4, 3, groups=2),
        32: Tile(32, 128, 4, 3),
        ANY: Tile(64, 128, 4, 3),
    },
    "w4a8": {
        8: Tile(16, 64, 4, 4),
        32: Tile(32, 128, 4, 3),
        ANY: Tile(64, 128, 8, 3),
    },
}
# Above MANY_ABOVE, up to so many rows → tile.
MANY: dict[str, dict[int, ManyTile]] = {
    "fp8_block": {
        512: ManyTile(128, 128, 6),
        ANY: ManyTile(256, 128, 4),
    },
    "w4a8": {
        ANY: ManyTile(128, 128, 5),
    },
}
# Above WIDE_ABOVE, up to so many rows → tiles, of which `gluon_four` chooses.
WIDE: dict[int, tuple[WideTile, ...]] = {
    96: (WideTile(64, 32, 6, 2), WideTile(64, 32, 5, 3)),
    128: (WideTile(128, 0, 5, 2), WideTile(128, 0, 4, 3)),
    160: (WideTile(128, 32, 4, 2), WideTile(128, 32, 4, 3)),
    192: (WideTile(128, 64, 3, 2), WideTile(128, 64, 3, 3)),
    256: (WideTile(128, 0, 5, 2), WideTile(128, 0, 4, 3)),
}
LIKE = {"fp8_block": "fp8", "w4a8_fp8": "w4a8"}  # tuned together


def tile_for(kind: str, rows: int, experts: int = 0) -> Tile:
    """The tile for `rows` in all, spread over `experts` weights (0: one weight)."""
    table, load = (GROUPED, rows / experts) if experts else (DENSE, rows)
    return next(tile for most, tile in table[LIKE.get(kind, kind)].items() if load <= most)


def max_chunks(kind: str, rows: int) -> int:
    """Into how many parts the 4-bit kernels cut K at most, for one weight. Only w4a16 looks at the number of rows."""
    return 4 if kind != "w4a16" else 6 if rows <= 64 else 2


def many_tile(kind: str, rows: int) -> ManyTile | None:
    """The tile of `gluon_many` for `rows` of one weight; None: they are too few, or the device is not a Hopper."""
    if not WARP_GROUPS or rows <= MANY_ABOVE[kind]:
        return None
    return next(tile for most, tile in MANY[kind].items() if rows <= most)


def wide_tiles(rows: int) -> tuple[WideTile, ...]:
    """The tiles of `gluon_four` for `rows` of one weight; none if they are too few or too many, or it is no Hopper."""
    if not WARP_GROUPS or rows <= WIDE_ABOVE["w4a16"]:
        return ()
    return next((tiles for most, tiles in WIDE.items() if rows <= most), ())
