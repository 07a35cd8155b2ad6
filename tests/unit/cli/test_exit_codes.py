"""What the system refuses is a failure, told in one line: whose path it was cannot be seen in the error."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lockstep.cli import BAD_INPUT, FAILED, STOPPED, run
from lockstep.config import ConfigError


def named(number: int | None, reason: str | None, path: str) -> OSError:
    error = OSError(number, reason)
    error.filename = path
    return error


def renamed(folder: Path) -> OSError:
    with pytest.raises(OSError) as raised:
        os.rename(folder / "gone", folder / "new")
    return raised.value


def said(error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    def fails() -> None:
        raise error

    monkeypatch.setattr("lockstep.cli.app.app", fails)
    code = run()
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/tmp/x"), "/tmp/x: Permission denied"),
        (PermissionError(errno.EACCES, "Permission denied"), "[Errno 13] Permission denied"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "runs/a"), "runs/a: Is a directory"),
        (named(errno.ENOSPC, None, "runs/a"), "runs/a: No space left on device"),
        (named(None, None, "runs/a"), "runs/a: OSError"),
        (ConnectionError("no route\n  to the hub"), "no route to the hub"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_the_system_s_errors_are_failures(
    error: OSError, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(error, monkeypatch, capsys) == (FAILED, f"error: {line}\n")


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(130)])
def test_who_stops_it_is_told(
    end: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(end, monkeypatch, capsys) == (STOPPED, "stopped; what was saved before is whole\n")


def test_a_failed_rename_names_both_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"error: {tmp_path}/gone -> {tmp_path}/new: No such file or directory\n"
    assert said(renamed(tmp_path), monkeypatch, capsys) == (FAILED, line)


def test_bad_input_has_a_code_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(ConfigError("no"), monkeypatch, capsys) == (BAD_INPUT, "error: no\n")
