"""One finished run, for all tests that only look at it."""

from __future__ import annotations

from pathlib import Path

import command_runs as runs
import pytest


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    result = runs.lockstep(folder, "train", str(runs.write_recipe(folder)), "--plain")
    assert result.returncode == 0, result.stderr
    return folder / "runs/small"
