"""How a run can end without having failed."""

from __future__ import annotations

from pathlib import Path


class Interrupted(Exception):  # noqa: N818 - not an error
    """The run in `root` was stopped by a signal; everything is saved."""

    def __init__(self, root: Path, step: int, steps: int) -> None:
        super().__init__(f"stopped after step {step} of {steps}")
        self.root = root


class Governed(Exception):  # noqa: N818 - not an error
    """A rule of the governor ended the run in `root`; everything is saved, and `reason` says which rule and why."""

    def __init__(self, root: Path, reason: str) -> None:
        super().__init__(f"the governor stopped the run: {reason}")
        self.root = root
