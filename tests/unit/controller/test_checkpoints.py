from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.controller.checkpoints import Checkpoints, Progress


def progress(step: int) -> Progress:
    return Progress(step=step, version=step, next_index=4 * step, unfinished=[1])


def save(checkpoints: Checkpoints, step: int, *, best: bool = False, text: str = "weights") -> Path:
    async def write(folder: Path) -> None:
        (folder / "deep").mkdir()
        (folder / "deep" / "weights").write_text(text)

    return asyncio.run(checkpoints.save(progress(step), write, best=best))


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_the_last_few_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert checkpoints.latest() is None
    assert checkpoints.best() is None
    for step in range(6):
        save(checkpoints, step, best=step in (0, 2))
    assert names(checkpoints.folder) == ["best", "step-000002", "step-000004", "step-000005"]
    assert os.readlink(checkpoints.folder / "best") == "step-000002"  # relative: a run folder can be moved
    found = checkpoints.latest()
    assert found == (checkpoints.folder / "step-000005", progress(5))


def test_order_is_by_number(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 999_999)
    save(checkpoints, 1_000_000)
    assert names(tmp_path) == ["step-1000000"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), asyncio.CancelledError()])
def test_a_failed_save_leaves_what_was_there(tmp_path: Path, error: BaseException) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1, best=True)

    async def write(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise error

    with pytest.raises(type(error)):
        asyncio.run(checkpoints.save(progress(2), write, best=True))
    assert names(tmp_path) == ["best", "step-000001"]
    assert (checkpoints.best() or tmp_path) / "deep" / "weights" == tmp_path / "step-000001" / "deep" / "weights"


def test_a_failed_rename_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)

    def fail(*args: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="Read-only"):
        save(checkpoints, 2)
    assert names(tmp_path) == ["step-000001"]


def test_a_step_is_written_once_but_may_become_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 3, text="first")
    save(checkpoints, 3, text="second", best=True)
    assert (tmp_path / "best" / "deep" / "weights").read_text() == "first"


def test_a_deletion_that_was_interrupted_is_never_seen_and_is_finished_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)

    def interrupted(path: Path, **options: object) -> None:
        (path / "progress.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(checkpoints, 2)
    found = checkpoints.latest()
    assert found is not None
    assert found[1].step == 2
    save(checkpoints, 3)
    assert names(tmp_path) == ["step-000003"]


WRITER = """
import asyncio, sys
from pathlib import Path
from lockstep.controller.checkpoints import Checkpoints, Progress

async def write(folder):
    for part in range(20):
        (folder / f"part-{part}").write_bytes(bytes(100_000))
    (folder / "complete").touch()

async def main():
    checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
    step = (found[1].step if (found := checkpoints.latest()) else 0) + 1
    print("writing", flush=True)
    while True:
        await checkpoints.save(
            Progress(step=step, version=step, next_index=0, unfinished=[]), write, best=step % 3 == 0
        )
        step += 1

asyncio.run(main())
"""


def test_killed_at_any_moment_only_whole_checkpoints_are_seen(tmp_path: Path) -> None:
    """kill -9 while saving without pause; then the next process goes on from the latest and sweeps up."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    newest = 0
    for attempt in range(3):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        while (found := checkpoints.latest()) is None or found[1].step <= newest:
            assert process.poll() is None
            time.sleep(0.002)
        time.sleep(0.007 * attempt)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        whole = list(tmp_path.glob("step-*"))
        assert whole
        assert all((folder / "complete").exists() and (folder / "progress.json").exists() for folder in whole)
        assert checkpoints.best() is None or (tmp_path / "best" / "complete").exists()
        newest = max(int(folder.name[5:]) for folder in whole)
    save(checkpoints, newest + 1)
    assert not list(tmp_path.glob(".aside*"))
