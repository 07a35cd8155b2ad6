"""Which tile a matmul kernel is compiled with, by format and number of rows: a fixed table, so nothing is tuned at run
time. Found on an H200 with `python -m lockstep.cli.tune_linear`, which prints the fastest tiles per shape.
"""

from __future__ import annotations

from lockstep.quant.kernels.triton_tiles import Tile

ANY = 1 << 40

# Up to so many rows (of one weight) → tile.
DENSE: dict[str, dict[int, Tile]] = {
    "int8": {16: Tile(16, 64, 4, 6, True), 64: Tile(64, 64, 4, 5, True), ANY: Tile(128, 128, 8, 3, False)},
    "fp8": {16: Tile(16, 64, 4, 6, True), 64: Tile(64, 64, 4, 5, True), ANY: Tile(128, 128, 8, 3, False)},
    "fp8_block": {16: Tile(16, 64, 4, 6, True), 64: Tile(64, 64, 4, 5, True), ANY: Tile(128, 128, 8, 3, False)},
    "w4a16": {16: Tile(16, 64, 4, 6, True), 64: Tile(64, 64, 4, 5, True), ANY: Tile(128, 64, 4, 3, False)},
    "w4a8": {16: Tile(16, 64, 4, 6, True), 64: Tile(64, 64, 4, 5, True), ANY: Tile(128, 64, 4, 3, False)},
    "w4a8_fp8": {16: Tile(16, 64, 4, 6, True), 64: Tile(64, 64, 4, 5, True), ANY: Tile(128, 64, 4, 3, False)},
}
# Up to so many rows per expert, on average → tile.
GROUPED: dict[str, dict[int, Tile]] = {
    kind: {4: Tile(16, 64, 4, 6, False), 32: Tile(32, 64, 4, 5, False), ANY: Tile(64, 64, 4, 4, False)}
    for kind in DENSE
}


def tile_for(kind: str, rows: int, experts: int = 0) -> Tile:
    """The tile for `rows` in all, spread over `experts` weights (0: one weight)."""
    table, load = (GROUPED, rows / experts) if experts else (DENSE, rows)
    return next(tile for most, tile in table[kind].items() if load <= most)
