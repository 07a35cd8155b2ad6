"""Recorders: onto the run folder (always), TensorBoard (always), Weights & Biases (if asked for)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import Field

from lockstep.config import Config, ConfigError
from lockstep.protocols import Recorder
from lockstep.report.excerpts import fell_apart
from lockstep.report.jsonl import JsonlWriter, Row, with_path
from lockstep.report.run_folder import RunFolder
from lockstep.types import Group, Trajectory, negative

_FALLEN_PER_STEP = 2  # answers that fell apart, kept whatever `samples_per_step`


class RecorderConfig(Config):
    samples_per_step: int = Field(default=2, ge=0)
    """Groups whose answers are kept per step; as many again if a reward failed, and 2 answers that fell apart."""

    wandb: bool = False
    """Also log to Weights & Biases (needs `pip install wandb`)."""


class Recorders:
    """Several recorders as one."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self._recorders = tuple(recorders)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for recorder in self._recorders:
            recorder.log(step, metrics)

    def samples(self, step: int, group: Group) -> None:
        for recorder in self._recorders:
            recorder.samples(step, group)

    def event(self, step: int, kind: str, text: str) -> None:
        for recorder in self._recorders:
            recorder.event(step, kind, text)


class RunRecorder:
    """The one writer of a run's history. After a resume (`folder.rewind` first) its clock goes on where it stopped."""

    def __init__(self, folder: RunFolder, config: RecorderConfig | None = None) -> None:
        self._config = config or RecorderConfig()
        wandb = WandbSink(folder) if self._config.wandb else None  # first: its complaint should leave no files behind
        last = max(folder.read_metrics(), key=lambda row: row["time"], default=None)
        self._start = time.monotonic() - (last["time"] if last else 0.0)
        self._metrics = JsonlWriter(folder.metrics)
        self._samples = JsonlWriter(folder.samples)
        self._events = JsonlWriter(folder.events)
        board = TensorBoardSink(folder.tensorboard, purge_step=last["step"] + 1 if last else None)
        self._mirrors: list[TensorBoardSink | WandbSink] = [board, *([wandb] if wandb else [])]
        self._kept: Counter[tuple[int, bool]] = Counter()  # groups seen, by step and whether a reward failed
        self._fell_apart: Counter[int] = Counter()  # answers outside of kept groups, by step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        self._metrics.append([{**self._clock(step), **values}])
        for mirror in tuple(self._mirrors):
            try:
                mirror.log(step, values)
            except Exception as error:  # it shows what is written down anyway: no reason to end a run
                self._mirrors.remove(mirror)
                self.event(step, "mirror", f"{type(mirror).__name__.removesuffix('Sink')} shows no more steps: {error}")

    def samples(self, step: int, group: Group) -> None:
        """Of a group that is not kept, answers that fell apart still are: a few a step, as they may be rare."""
        kept = self._wanted(step, failed=any(t.verdict.failed for t in group.trajectories))
        rows = [row for row in sample_rows(group) if kept or self._telling(step, row)]
        self._samples.append({**self._clock(step), **row} for row in rows)

    def event(self, step: int, kind: str, text: str) -> None:
        self._events.append([{**self._clock(step), "kind": kind, "text": text}])

    def close(self) -> None:
        for writer in (self._metrics, self._samples, self._events):
            writer.close()
        for mirror in self._mirrors:
            with suppress(Exception):
                mirror.close()

    def __enter__(self) -> RunRecorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _clock(self, step: int) -> Row:
        return {"step": step, "time": round(time.monotonic() - self._start, 3), "wall": round(time.time(), 3)}

    def _wanted(self, step: int, failed: bool) -> bool:
        self._kept[step, failed] += 1
        return self._kept[step, failed] <= self._config.samples_per_step

    def _telling(self, step: int, row: Row) -> bool:
        self._fell_apart[step] += fell_apart(row)
        return fell_apart(row) and self._fell_apart[step] <= _FALLEN_PER_STEP


def sample_rows(group: Group) -> Iterator[Row]:
    """One row per answer, without the clock. `reward` is null where the reward failed."""
    prompt = [{"role": message.role, "content": message.content} for message in group.sample.messages]
    negatives = {answer.uid for answer in negative(group.trajectories)}
    for trajectory in group.trajectories:
        yield {
            "group": group.index,
            "sample": group.sample.uid,
            "uid": trajectory.uid,
            "version": group.version,
            "prompt": prompt,
            "expected": group.sample.answer,
            "text": trajectory.text,
            **_judgement(trajectory),
            "negative": trajectory.uid in negatives,
        }


def _judgement(trajectory: Trajectory) -> Row:
    return {
        "reward": trajectory.verdict.value,
        "parts": dict(trajectory.verdict.parts),
        "reasons": list(trajectory.verdict.reasons),
        "stop_reason": str(trajectory.stop_reason),
        "flaws": list(trajectory.flaws),
        "num_tokens": trajectory.num_sampled,
        "num_prompt_tokens": len(trajectory.tokens) - trajectory.num_sampled,
    }


class TensorBoardSink:
    def __init__(self, folder: Path, purge_step: int | None) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]  # generated
        from torch.utils.tensorboard import SummaryWriter  # imports TensorFlow where there is one

        self._summary: Any = Summary
        self._folder = folder
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """All values in one event: hundreds of events would cost more than everything else that is recorded."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        assert self._writer.file_writer is not None
        try:
            self._writer.file_writer.add_summary(self._summary(value=values), step)
        except OSError as error:
            raise with_path(error, self._folder) from error

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Continues the same W&B run after a resume: the run folder's id is its id."""

    def __init__(self, folder: RunFolder) -> None:
        if find_spec("wandb") is None:
            raise ConfigError("wandb = true, but Weights & Biases is not installed: pip install wandb")
        import wandb  # pyright: ignore[reportMissingImports]

        self._run: Any = wandb.init(
            project="lockstep",
            name=folder.name,
            id=folder.read_environment().get("id"),
            resume="allow",
            dir=str(folder.root),
            config=folder.read_config(),
        )
        self._run.define_metric("*", step_metric="step")  # W&B's own step may not restart; a warm-up's does

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        self._run.finish()
