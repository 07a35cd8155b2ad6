"""The whole command under torchrun: rank 0 samples and leads, both ranks learn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import command_runs as runs
import pytest
import torch
from safetensors.torch import load_file


@pytest.mark.timeout(400)
def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    recipe = str(runs.write_recipe(tmp_path))
    alone = runs.lockstep(tmp_path, "train", recipe, "train.steps=2", "name=alone", "--plain")
    assert alone.returncode == 0, alone.stderr
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "lockstep"]
    together = subprocess.run(
        [*torchrun, "train", recipe, "train.steps=2", "name=together", "--plain"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert together.returncode == 0, together.stderr
    one, two = (
        load_file(tmp_path / f"runs/{n}/checkpoints/step-000002/model.safetensors") for n in ("alone", "together")
    )
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=2e-4, rtol=1e-3)
