"""Rows of a dataset, wherever it lies: jsonl or parquet files, a folder, or a name on the Hugging Face hub."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config import ConfigError
from lockstep.config.paths import given_path

Row = Mapping[str, Any]

_HUB_NAME = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(#(?P<config>[\w.-]+))?")
_SAVED_TO_DISK = ("state.json", "dataset_dict.json")  # what datasets' save_to_disk leaves in its folder


def read_rows(path: str, split: str) -> Sequence[Row]:
    """The rows of `path`, in a fixed order; ConfigError if they cannot be read or there are none.

    `path` is a .jsonl or .parquet file, a pattern (`data/*.jsonl`, read in the order of the names), a dataset
    folder, or a hub name, with a configuration after `#` if it has several (`openai/gsm8k#main`). `split` picks one
    of a folder or a hub dataset; a file has no splits, all its rows are read.
    """
    rows = _read_files(path) if is_files(path) else _read_dataset(path, split)
    if not len(rows):
        raise ConfigError(f"{path} holds no rows")
    return rows


def is_files(path: str) -> bool:
    """Whether `path` names plain files, which have no splits."""
    with given_path(f"cannot read {path}"):
        return Path(path).is_file() or glob.has_magic(path) or Path(path).suffix in _READERS


def _read_files(path: str) -> Sequence[Row]:
    files = [Path(name) for name in sorted(glob.glob(path))] if glob.has_magic(path) else [Path(path)]
    if not files or not all(file.is_file() for file in files):
        raise ConfigError(f"no file at {path}")
    return [row for file in files for row in _read_file(file)]


def _read_file(file: Path) -> Sequence[Row]:
    if file.suffix not in _READERS:
        raise ConfigError(f"cannot read {file}: unknown suffix {file.suffix!r}; choices: {', '.join(_READERS)}")
    try:
        return _READERS[file.suffix](file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {_first_line(error)}") from None


def _read_jsonl(file: Path) -> list[Row]:
    with file.open(encoding="utf-8") as lines:
        return [_parse_line(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def _parse_line(line: str, place: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: not valid JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of lists in lists
        raise ConfigError(f"{place}: cannot be read: {_first_line(error)}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: expected an object, got {type(row).__name__}")
    return row


def _read_parquet(file: Path) -> list[Row]:
    import pyarrow as pa  # imported on use: whatever judges answers must start fast
    from pyarrow import parquet

    try:
        return parquet.read_table(file).to_pylist()
    except pa.ArrowInvalid as error:
        raise ConfigError(f"cannot read {file}: {_first_line(error)}") from None


_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet}


def _read_dataset(path: str, split: str) -> Sequence[Row]:
    folder = Path(path).is_dir()
    hub = _HUB_NAME.fullmatch(path)
    if not folder and hub is None:
        raise ConfigError(f"no file or folder at {path}, and it is not a hub name such as 'openai/gsm8k#main'")
    try:
        loaded = _load_folder(Path(path), split) if folder or hub is None else _load_hub(hub, split)
    except (OSError, ValueError) as error:  # datasets' own errors derive from these
        raise ConfigError(f"cannot read split {split!r} of {path}: {_first_line(error)}") from None
    return _DatasetRows(loaded)


def _load_folder(folder: Path, split: str) -> Any:
    import datasets

    if not any((folder / name).exists() for name in _SAVED_TO_DISK):
        return datasets.load_dataset(str(folder), split=split)
    saved = datasets.load_from_disk(folder)
    if not isinstance(saved, datasets.DatasetDict):
        return saved
    if split not in saved:
        raise ValueError(f"no such split; choices: {', '.join(map(str, saved))}")
    return saved[split]


def _load_hub(hub: re.Match[str], split: str) -> Any:
    import datasets

    return datasets.load_dataset(hub["name"], hub["config"], split=split)


class _DatasetRows(Sequence[Row]):
    """A `datasets.Dataset` as a plain sequence of rows, still read from disk as they are asked for."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._dataset[i] for i in range(*index.indices(len(self)))]
        return self._dataset[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._dataset)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
