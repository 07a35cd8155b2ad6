"""One finished run, for all tests that only look at it; and the command, in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import command_runs as runs
import pytest

from lockstep.cli import main


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    result = runs.lockstep(folder, "train", str(runs.write_recipe(folder)), "--plain")
    assert result.returncode == 0, result.stderr
    return folder / "runs/small"


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Runs the command in this process; gives its exit code, its output and the lines of its complaint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str, list[str]]:
        monkeypatch.setattr(sys, "argv", ["lockstep", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        said = capfd.readouterr()
        return int(exit_.value.code or 0), said.out, [x for x in said.err.splitlines() if x.startswith("error: ")]

    return run
