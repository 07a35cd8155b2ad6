"""How the matmul kernels are compiled, by format and number of rows: a fixed table, so that nothing is tuned at run
time. Found on an H200 with `python -m lockstep.cli.tune_linear`, which prints the fastest tiles.
"""

from __future__ import annotations

from lockstep.quant.kernels.triton_tiles import Tile

ANY = 1 << 40
MANY_ROWS = 512  # above it w4a16 writes the weight out in 16 bits and calls the library

# Programs that a launch of few rows is cut into (see num_chunks): part of the order of sums, so one for all rows.
# Of 192, 384, 768 and 1536: more programs hide the unpacking of 4 bits (w4a16: 768 is 6% faster than 384 at 16 rows),
# but cost more where their sums meet (19% at 64 rows).
FILL = {"int8": 192, "fp8": 192, "fp8_block": 192, "w4a16": 384, "w4a8": 384, "w4a8_fp8": 384}

# Up to so many rows → tile.
DENSE: dict[str, dict[int, Tile]] = {
    "int8": {
        16: Tile(16, 64, 4, 4, True, 2),
        32: Tile(32, 64, 4, 6, True),
        64: Tile(64, 64, 4, 6, True),
        512: Tile(64, 64, 4, 4, False),
        ANY: Tile(256, 128, 8, 4, False),
    },
    "fp8": {
        16: Tile(16, 64, 4, 6, True),
        32: Tile(32, 64, 4, 8, True),
        64: Tile(64, 64, 4, 8, True),
        512: Tile(64, 128, 8, 4, True),
        ANY: Tile(128, 64, 4, 3, False),
    },
    "w4a16": {
        16: Tile(16, 64, 4, 3, True),
        32: Tile(32, 64, 4, 3, True),
        64: Tile(64, 64, 4, 3, True),
        ANY: Tile(128, 64, 4, 2, True),
    },
    "w4a8": {
        16: Tile(16, 64, 4, 3, True),
        32: Tile(32, 64, 4, 3, True),
        64: Tile(64, 64, 4, 3, True),
        512: Tile(128, 64, 4, 3, True),
        ANY: Tile(128, 64, 4, 3, False),
    },
}
# Up to so many rows per expert, on average → tile.
GROUPED: dict[str, dict[int, Tile]] = {
    "int8": {
        2: Tile(16, 128, 4, 3, False),
        8: Tile(16, 128, 4, 3, False),
        32: Tile(32, 64, 4, 3, False),
        ANY: Tile(64, 128, 8, 4, False),
    },
    "fp8": {
        2: Tile(16, 64, 4, 4, False),
        8: Tile(16, 64, 4, 4, False),
        32: Tile(32, 64, 4, 3, False),
        ANY: Tile(64, 128, 8, 4, False),
    },
    "w4a16": {
        2: Tile(16, 128, 4, 3, False),
        8: Tile(16, 128, 4, 3, False),
        32: Tile(32, 128, 4, 3, False),
        ANY: Tile(64, 128, 8, 3, False),
    },
    "w4a8": {
        2: Tile(16, 128, 4, 3, False),
        8: Tile(16, 128, 4, 3, False),
        32: Tile(32, 128, 4, 3, False),
        ANY: Tile(64, 128, 8, 3, False),
    },
}
LIKE = {"fp8_block": "fp8", "w4a8_fp8": "w4a8"}  # tuned together


def tile_for(kind: str, rows: int, experts: int = 0) -> Tile:
    """The tile for `rows` in all, spread over `experts` weights (0: one weight)."""
    table, load = (GROUPED, rows / experts) if experts else (DENSE, rows)
    return next(tile for most, tile in table[LIKE.get(kind, kind)].items() if load <= most)
