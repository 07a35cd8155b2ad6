from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.report.run_folder import RunFolder
from lockstep.types import Group, Message, Sample, StopReason, Trajectory, Verdict


def make_group(index: int = 0, *rewards: float | None, text: str = "It is 42.") -> Group:
    sample = Sample(uid=f"train/{index}", messages=(Message("user", "What is 6 * 7?"),), answer="42")
    return Group(
        index=index,
        sample=sample,
        version=3,
        trajectories=tuple(_trajectory(f"{index}/{i}", reward, text) for i, reward in enumerate(rewards)),
    )


def _trajectory(uid: str, reward: float | None, text: str) -> Trajectory:
    return Trajectory(
        uid=uid,
        tokens=torch.arange(6),
        mask=torch.tensor([False, False, True, True, True, True]),
        logp_behav=torch.zeros(6),
        versions=torch.zeros(6, dtype=torch.int32),
        temperature=1.0,
        stop_reason=StopReason.EOS,
        verdict=Verdict(value=reward, parts={"correct": reward or 0.0}, reasons=("correct: 42 equals 42",)),
        text=text,
        flaws=("repetition",),
    )


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run")
