"""What a run ran on, for whoever has to reproduce it or explain its speed."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from lockstep import __version__

_PACKAGES = ("torch", "transformers")


def environment(device: str | torch.device, command: Sequence[str] | None = None) -> dict[str, Any]:
    """JSON-ready facts. `command` is this process's own unless given."""
    device = torch.device(device)
    return {
        "id": uuid.uuid4().hex[:12],
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": list(sys.argv if command is None else command),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "commit": git_commit(Path(__file__).parent),
        "lockstep": __version__,
        **{package: metadata.version(package) for package in _PACKAGES},
    }


def git_commit(folder: Path) -> str | None:
    """The commit of the checkout that `folder` is in, with + if files changed since; None outside of one."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    return commit + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
