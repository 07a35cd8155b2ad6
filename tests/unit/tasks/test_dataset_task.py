import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from lockstep.config import ConfigError, choices
from lockstep.tasks import DatasetTask
from lockstep.types import Message, Sample, Verdict


@dataclass(frozen=True, kw_only=True)
class Counts(DatasetTask):
    def reward(self, sample: Sample, answer: str) -> Verdict:
        return Verdict(value=float(answer.count(sample.answer)))


def write(path: Path, num_rows: int) -> str:
    path.write_text("".join(json.dumps({"prompt": f"say {i}", "answer": str(i)}) + "\n" for i in range(num_rows)))
    return str(path)


def test_a_reward_alone_makes_a_task(tmp_path: Path) -> None:
    task = Counts(path=write(tmp_path / "a.jsonl", 40))
    sample = task.samples("train")[0]
    assert sample.messages == (Message("user", f"say {sample.answer}"),)
    assert task.reward(sample, f"{sample.answer} {sample.answer}").value == 2.0
    assert task.demonstrations() == []


def test_one_file_is_split_by_what_is_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 200)
    train, held_out = ({s.messages for s in Counts(path=path).samples(split)} for split in ("train", "eval"))
    assert len(train) + len(held_out) == 200
    assert 5 < len(held_out) < 40
    assert not train & held_out
    longer = write(tmp_path / "b.jsonl", 300)
    assert held_out <= {s.messages for s in Counts(path=longer).samples("eval")}, "new rows move no old ones"


def test_two_files_are_kept_as_they_are(tmp_path: Path) -> None:
    task = Counts(path=write(tmp_path / "a.jsonl", 20), eval_path=write(tmp_path / "b.jsonl", 10))
    assert [s.uid for s in task.samples("eval")] == [f"eval/{i}" for i in range(10)]
    assert len(task.samples("train")) == 20


def test_a_folder_has_its_own_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "train.jsonl", 5)
    write(folder / "test.jsonl", 3)
    task = Counts(path=str(folder))
    assert (len(task.samples("train")), len(task.samples("eval"))) == (5, 3)


def test_complaints(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "?"}\n')
    path = str(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match="none of the fields messages, prompt; it has text"):
        Counts(path=path).samples("train")
    with pytest.raises(ConfigError, match="unknown split 'test'; choices: train, eval"):
        Counts(path=path).samples("test")
    with pytest.raises(ConfigError, match="too few different prompts"):
        Counts(path=write(tmp_path / "b.jsonl", 1)).samples("eval")


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ('{"prompt": 5}', "the prompt is 5; expected text, or a list of messages"),
        ('{"prompt": []}', "expected text, or a list of messages"),
        ('{"prompt": ["hi"]}', "a message is 'hi'; expected a `role` and a `content`"),
        ('{"prompt": [{"content": "hi"}]}', "expected a `role` and a `content`, both text"),
        ('{"prompt": [{"role": "user", "content": null}]}', "expected a `role` and a `content`, both text"),
        ('{"prompt": "ab\\ud800c"}', "a prompt is not valid Unicode, at"),
        ('{"prompt": "?", "solution": {}}', "its solution is a dict; expected text"),
    ],
)
@pytest.mark.parametrize("two_files", [False, True])
def test_a_bad_row_is_named_before_anything_is_trained(row: str, why: str, two_files: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 40)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write(row + "\n")
    with pytest.raises(ConfigError, match=f"row train/40: .*{re.escape(why)}"):
        Counts(path=path, eval_path=path if two_files else "").samples("train")


@pytest.mark.parametrize("row", ['{"prompt": ' + "9" * 5000 + "}", '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}"])
def test_json_that_python_does_not_read(row: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(row + "\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: cannot be read"):
        Counts(path=str(tmp_path / "a.jsonl")).samples("train")


def test_an_answer_that_is_null_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "?", "answer": null}\n{"prompt": "?", "answer": 7}\n')
    task = Counts(path=str(tmp_path / "a.jsonl"), eval_path=str(tmp_path / "a.jsonl"))
    assert [sample.answer for sample in task.samples("train")] == ["", "7"]


def test_the_folder_lists_the_tasks() -> None:
    assert choices("lockstep.tasks") == ["arithmetic", "countdown", "math"]
