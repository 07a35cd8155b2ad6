"""Append-only JSON lines that survive `kill -9` and a full disk: only the last line of a file may be torn."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.config import ConfigError

Row = dict[str, Any]


def encode(row: Mapping[str, Any]) -> bytes:
    """One line of strict JSON. NaN and infinities become the strings "NaN", "Infinity", "-Infinity", which
    `float()` reads back; a lone surrogate of a half-decoded answer becomes its JSON escape."""
    text = json.dumps(_finite(row), ensure_ascii=False, allow_nan=False, separators=(", ", ": "))
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def read(path: Path) -> Iterator[Row]:
    """The rows of a log that another process may be writing: a last line without its end is not there yet."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield _decode(line, path, number)


def _decode(line: bytes, path: Path, number: int) -> Row:
    try:
        row = json.loads(line)
    except ValueError:
        raise ConfigError(f"{path} is damaged: line {number} is not JSON") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{path} is damaged: line {number} is not a JSON object")
    return row


def write_atomically(path: Path, content: bytes) -> None:
    """The file holds either all of `content` or what it held before."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise with_path(error, path) from error


def keep_rows(path: Path, keep: Callable[[Row], bool]) -> int:
    """Drops the rows that `keep` refuses, atomically; returns how many went."""
    rows = list(read(path))
    kept = [row for row in rows if keep(row)]
    if len(kept) < len(rows):
        write_atomically(path, b"".join(map(encode, kept)))
    return len(rows) - len(kept)


def with_path(error: OSError, path: Path) -> OSError:
    """The same error naming the file: a failed write knows only its descriptor."""
    return OSError(error.errno, error.strerror, str(path))


class JsonlWriter:
    """Appends rows, each in one unbuffered write: what was logged before a kill is in the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._cut_torn_line()

    def _cut_torn_line(self) -> None:
        if self.path.stat().st_size == 0:  # which mmap refuses
            return
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = content.rfind(b"\n") + 1
        self._file.truncate(end)

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """All of `rows` or, if the disk is full, none of them."""
        data = b"".join(map(encode, rows))
        start = os.fstat(self._file.fileno()).st_size
        try:
            written = 0
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError as error:
            self._file.truncate(start)
            raise with_path(error, self.path) from error

    def close(self) -> None:
        self._file.close()
