import json
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow as pa
import pytest
from pyarrow import parquet

from lockstep.config import ConfigError
from lockstep.data.sources import read_rows

ROWS = [{"question": f"q{i}", "answer": str(i)} for i in range(3)]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def write_jsonl(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_jsonl_and_parquet_hold_the_same_rows(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert read_rows(str(tmp_path / "a.jsonl"), "train") == ROWS
    assert read_rows(str(tmp_path / "a.parquet"), "train") == ROWS


def test_pattern_reads_shards_in_order(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "part-1.jsonl", ROWS[1:])
    write_jsonl(tmp_path / "part-0.jsonl", ROWS[:1])
    assert read_rows(str(tmp_path / "part-*.jsonl"), "train") == ROWS


def test_saved_dataset_folder(tmp_path: Path) -> None:
    splits = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    )
    splits.save_to_disk(tmp_path / "saved")
    rows = read_rows(str(tmp_path / "saved"), "train")
    assert list(rows) == ROWS
    assert rows[1:] == ROWS[1:]
    assert rows[-1] == ROWS[-1]
    assert list(read_rows(str(tmp_path / "saved"), "test")) == ROWS[:1]
    with pytest.raises(ConfigError, match=r"'validation' of .*saved: no such split; choices: train, test"):
        read_rows(str(tmp_path / "saved"), "validation")


def test_folder_of_data_files_has_splits_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", ROWS)
    write_jsonl(folder / "test.jsonl", ROWS[:1])
    assert list(read_rows(str(folder), "train")) == ROWS
    assert list(read_rows(str(folder), "test")) == ROWS[:1]
    with pytest.raises(ConfigError, match="validation"):
        read_rows(str(folder), "validation")


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.jsonl", '{"x": 1}\n{"x": \n', r"a\.jsonl:2: not valid JSON"),
        ("a.jsonl", "[1, 2]\n", r"a\.jsonl:1: expected an object, got list"),
        ("a.jsonl", "\n", r"a\.jsonl holds no rows"),
        ("a.jsonl", b"\xff\xfe{}", r"cannot read .*a\.jsonl"),
        ("a.parquet", "not parquet", r"cannot read .*a\.parquet"),
        ("a.xlsx", "x", r"unknown suffix '\.xlsx'; choices: \.jsonl, \.parquet"),
    ],
)
def test_broken_file_is_one_clear_line(tmp_path: Path, name: str, content: str | bytes, complaint: str) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_rows(str(tmp_path / name), "train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["missing.jsonl", "missing-*.jsonl", "no/such/folder/here"])
def test_missing_path(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match="no file"):
        read_rows(str(tmp_path / path), "train")


def test_unknown_hub_name_offline() -> None:
    with pytest.raises(ConfigError, match="cannot read split 'train' of nobody/nothing"):
        read_rows("nobody/nothing", "train")
