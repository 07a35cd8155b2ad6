"""The base for tasks whose samples are rows of a dataset."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.config import ConfigError
from lockstep.data.sources import is_files, read_rows
from lockstep.tasks._lazy import LazySamples, hash_share
from lockstep.types import Message, Sample

_HELD_OUT = 0.1


@dataclass(frozen=True, kw_only=True)
class DatasetTask:
    """Rows and a reward. The smallest task of your own is a `reward` (a Verdict, or just a number):

        @dataclass(frozen=True, kw_only=True)
        class Poems(DatasetTask):
            def reward(self, sample, answer):
                return answer.count("\\n") == 3

    which a recipe uses as `task = {name = "my_tasks/poems.py:Poems", path = "poems.jsonl"}`. Rows are expected to have
    `messages` or `prompt`, and maybe `answer` and `solution`; override `sample` if they look different.
    Rewards run in worker processes under a time limit, see `lockstep.tasks.judging.judge`.
    """

    path: str
    """Dataset to train on: a .jsonl or .parquet file, a pattern of files, a dataset folder, or a hub name."""
    eval_path: str = ""
    """Dataset to evaluate on. By default the split `test` of `path`; for a file, a tenth of it, held out by hash."""
    train_split: str = "train"
    """Split of a dataset folder or hub dataset to train on."""
    eval_split: str = "test"
    """Split of a dataset folder or hub dataset to evaluate on."""

    def sample(self, uid: str, row: Mapping[str, Any]) -> Sample:
        """One row as a sample."""
        return Sample(
            uid=uid,
            messages=read_messages(first_of(row, ("messages", "prompt"))),
            answer="" if row.get("answer") is None else str(row["answer"]),
            solution=_solution(row.get("solution")),
            info=row,
        )

    def samples(self, split: str) -> Sequence[Sample]:
        if split not in ("train", "eval"):
            raise ConfigError(f"unknown split {split!r}; choices: train, eval")
        if is_files(self.path) and not self.eval_path:
            return self._held_out(split)
        rows = self._rows(split)
        lazy = LazySamples(len(rows), lambda i: self._read(f"{split}/{i}", rows[i]))
        path = self.path if split == "train" else self.eval_path or self.path
        return list(lazy) if is_files(path) else lazy  # of a file all are read anyway, and may be refused at once

    def demonstrations(self) -> Sequence[Sample]:
        """The training samples whose rows hold a worked solution."""
        return [sample for sample in self.samples("train") if sample.solution]

    def _rows(self, split: str) -> Sequence[Mapping[str, Any]]:
        if split == "train":
            return read_rows(self.path, self.train_split)
        return read_rows(self.eval_path or self.path, self.eval_split)

    def _held_out(self, split: str) -> Sequence[Sample]:
        """One file for both: what the model is asked decides, so equal prompts are never on both sides."""
        samples = [self._read(f"{split}/{i}", row) for i, row in enumerate(self._rows("train"))]
        chosen = [s for s in samples if _is_held_out(s) == (split == "eval")]
        if not chosen:
            raise ConfigError(f"{self.path} has too few different prompts to hold some out: set eval_path")
        return chosen

    def _read(self, uid: str, row: Mapping[str, Any]) -> Sample:
        """`sample`, which may be the user's own, and what it raises told with the row."""
        try:
            made = self.sample(uid, row)
            for message in made.messages:
                message.content.encode()
        except UnicodeEncodeError as error:
            near = error.object[max(0, error.start - 20) : error.start + 20]
            raise ConfigError(f"row {uid}: a prompt is not valid Unicode, at {near!r}") from None
        except ConfigError as error:
            raise ConfigError(f"row {uid}: {error}") from None
        except Exception as error:
            raise ConfigError(f"row {uid}: {type(error).__name__}: {error}") from error
        return made


def _is_held_out(sample: Sample) -> bool:
    return hash_share("\n".join(m.content for m in sample.messages)) < _HELD_OUT


def _solution(value: Any) -> str | None:
    """A number is taken as it would be written."""
    if isinstance(value, Mapping | list | tuple):
        raise ConfigError(f"its solution is a {type(value).__name__}; expected text")
    return None if value is None else str(value)


def first_of(row: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """The value of the first of `keys` that the row has."""
    for key in keys:
        if row.get(key) is not None:
            return row[key]
    raise ConfigError(f"it has none of the fields {', '.join(keys)}; it has {', '.join(row)}")


def read_messages(value: Any) -> tuple[Message, ...]:
    """A prompt as messages: plain text is what the user says; a list has a role and content in each item."""
    if isinstance(value, str):
        return (Message("user", value),)
    turns = list(value) if isinstance(value, Iterable) and not isinstance(value, Mapping) else []
    if not turns:
        raise ConfigError(f"the prompt is {value!r}; expected text, or a list of messages")
    for turn in turns:
        if not isinstance(turn, Mapping) or not all(isinstance(turn.get(key), str) for key in ("role", "content")):
            raise ConfigError(f"a message is {turn!r}; expected a `role` and a `content`, both text")
    return tuple(Message(turn["role"], turn["content"]) for turn in turns)
