"""Engines in processes of their own: what they tell arrives, and nothing of them stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.cli import rollout_processes
from lockstep.cli.rollout_processes import PROGRESS, REFUSED, RESULT, EngineError, has_module, told_by
from lockstep.config import ConfigError

FOREVER = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def telling(kind: str, what: str) -> str:
    return f"print({kind!r} + {what!r}, flush=True); "


def goes(pid: int) -> bool:
    """Its parent is gone, so that somebody else buries it, some time soon."""
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_progress_and_results_come_in_order() -> None:
    code = telling(PROGRESS, '"half"') + "print('noise'); " + telling(RESULT, '{"a": 1}')
    assert list(told_by("it", python(code), None)) == [(PROGRESS, "half"), (RESULT, {"a": 1})]


def test_what_a_process_refuses_is_bad_input() -> None:
    with pytest.raises(ConfigError, match="no such thing"):
        list(told_by("it", python(telling(REFUSED, '"no such thing"')), None))


@pytest.mark.parametrize("code", ["raise SystemExit('broken')", "print('broken')"])
def test_a_failure_shows_the_end_of_the_log(code: str) -> None:
    with pytest.raises(EngineError, match=r"it failed \(exit code [01]\):\nbroken"):
        list(told_by("it", python(code), None))


def test_what_a_process_started_ends_with_it() -> None:
    """A reader that stops early, as one does who is interrupted."""
    told = told_by("it", python(FOREVER + "print('RESULT %d' % p.pid, flush=True); p.wait()"), None)
    _, pid = next(told)
    told.close()
    assert goes(pid)


def test_who_takes_too_long_is_ended_with_what_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_processes, "TIMEOUT", 3.0)
    told = told_by("it", python(FOREVER + "print('RESULT %d' % p.pid, flush=True); p.wait()"), None)
    _, pid = next(told)
    with pytest.raises(EngineError, match="exit code -9"):
        next(told)
    assert goes(pid)


def test_an_interpreter_is_asked_for_a_module() -> None:
    assert has_module(sys.executable, "torch")
    assert not has_module(sys.executable, "nobody_has_this")
    assert not has_module("true", "torch")


def test_who_ends_it_all_leaves_no_process_and_no_folder() -> None:
    code = (
        "from rich.console import Console; from lockstep.cli.bench_rollout import compare; "
        "compare('tiny', None, ['64x8x512+2048'], ['lockstep'], None, Console(width=200))"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert "started" in process.stdout.readline()
        (engine,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        folder = Path(Path(f"/proc/{engine}/cmdline").read_text().split("\0")[4])
        assert (folder / "config.json").exists()
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    assert not folder.exists()
    assert goes(int(engine))
