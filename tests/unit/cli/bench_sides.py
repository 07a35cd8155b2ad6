"""Sides to measure, in a module that a fresh interpreter imports quickly."""

from __future__ import annotations

from pathlib import Path

from lockstep.cli.benchmarks import Turn


def counting_side(turn: Turn, tokens: int, log: Path, name: str) -> None:
    turn.begin()
    for _ in range(3):
        turn.count(1, tokens)
        turn.count(1, tokens)
        with log.open("a") as file:
            file.write(name)
        turn.end_step()


def failing_side(turn: Turn) -> None:
    turn.begin()
    raise ValueError("no more memory")
