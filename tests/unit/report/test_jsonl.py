from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.report import jsonl
from lockstep.report.jsonl import JsonlWriter, encode, keep_rows, read


def reject_constant(name: str) -> float:
    raise AssertionError(f"{name} is not JSON")


@given(st.floats(), st.text(st.characters(codec=None)))
def test_any_float_and_any_text_is_one_line_of_strict_json(value: float, text: str) -> None:
    line = encode({"value": value, "nested": [{"text": text}]})
    assert line.count(b"\n") == 1
    row = json.loads(line, parse_constant=reject_constant)
    assert repr(float(row["value"])) == repr(value)  # NaN compares unequal to itself
    assert row["nested"][0]["text"] == text


def test_a_torn_last_line_is_not_read_and_is_cut_on_reopen(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "rew')
    assert list(read(path)) == [{"step": 1}]
    writer = JsonlWriter(path)
    writer.append([{"step": 2}])
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_a_log_that_is_only_a_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"st')
    JsonlWriter(path).close()
    assert path.read_bytes() == b""


def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"log\.jsonl is damaged: line 2"):
        list(read(path))


def test_everything_appended_before_a_kill_is_there(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    script = (
        "import os, signal, sys; from pathlib import Path; from lockstep.report.jsonl import JsonlWriter\n"
        "writer = JsonlWriter(Path(sys.argv[1]))\n"
        "for step in range(50): writer.append([{'step': step}])\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    result = subprocess.run([sys.executable, "-c", script, str(path)])
    assert result.returncode == -signal.SIGKILL
    assert [row["step"] for row in read(path)] == list(range(50))


class FullDisk:
    """A file that takes ten bytes and then no more, as a disk does when it fills up."""

    def __init__(self, file: object) -> None:
        self.file = file
        self.room = 10

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room = 0
        return self.file.write(data[:10])  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> object:
        return getattr(self.file, name)


def test_a_full_disk_names_the_file_and_leaves_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    writer = JsonlWriter(path)
    writer.append([{"step": 1}])
    whole, writer._file = writer._file, FullDisk(writer._file)  # type: ignore[assignment]
    with pytest.raises(OSError, match=r"No space left on device: .*log\.jsonl"):
        writer.append([{"step": 2, "text": "long enough"}])
    writer._file = whole
    writer.append([{"step": 3}])
    assert [row["step"] for row in read(path)] == [1, 3]


def test_a_failed_rewrite_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n')

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jsonl.os, "fsync", fail)
    with pytest.raises(OSError, match=r"log\.jsonl"):
        keep_rows(path, lambda row: row["step"] < 2)
    assert len(list(read(path))) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]
