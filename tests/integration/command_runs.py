"""Real runs of the command line in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
RECIPE = f"""
name = "small"
[model.init]
hidden = 32
layers = 2
heads = 2
context = 64
[task]
name = "{HERE / "printable.py"}:Printable"
[algorithm]
surrogate = "grpo"
truncated = "keep"
[train]
steps = 6
prompts = 4
group_size = 4
[rollout]
max_tokens = 8
[learner]
learning_rate = 1e-2
[eval]
every = 3
samples = 8
[checkpoint]
every = 1
keep = 10
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "lockstep", *arguments]


def write_recipe(folder: Path) -> Path:
    path = folder / "small.toml"
    path.write_text(RECIPE)
    return path


def lockstep(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240
    )


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 200) -> None:
    """Fails with the process's output if it ends, or time is up, before the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise AssertionError(f"never happened; the process said:\n{process.communicate()[0]}")
        time.sleep(0.02)


def metrics(run: Path, name: str) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[name] for row in rows if name in row}


def weights(run: Path, step: int) -> bytes:
    return (run / f"checkpoints/step-{step:06d}/model.safetensors").read_bytes()
