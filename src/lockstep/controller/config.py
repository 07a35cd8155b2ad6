"""How long and how a run trains, and what it leaves behind."""

from __future__ import annotations

from pydantic import Field

from lockstep.config import Config


class TrainConfig(Config):
    """The loop."""

    steps: int = Field(ge=0)
    """training steps; each consumes one batch and publishes one version of the weights"""
    prompts: int = Field(default=16, ge=1)
    """groups in a batch: one per prompt"""
    group_size: int = Field(default=8, ge=1)
    """answers per prompt"""
    max_staleness: int = Field(default=0, ge=0)
    """versions sampling may run ahead: 0 alternates and is repeatable, 1 and more overlap sampling with learning"""
    max_replaced: int = Field(default=4, ge=0)
    """dynamic sampling replaces groups without signal, at most this many batches' worth per step"""


class CheckpointConfig(Config):
    """What is kept on disk."""

    every: int = Field(default=0, ge=0)
    """steps between checkpoints; 0: only the last and the best"""
    keep: int = Field(default=2, ge=1)
    """newest checkpoints kept, besides the best by eval/accuracy"""
