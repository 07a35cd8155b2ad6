"""What `lockstep doctor` says is what is here."""

from __future__ import annotations

import io
from importlib.machinery import ModuleSpec

import pytest
from rich.console import Console

from lockstep.cli import doctor
from lockstep.config import choices


def row(name: str) -> str | None:
    console = Console(file=io.StringIO(), width=200)
    doctor.examine(console)
    assert isinstance(console.file, io.StringIO)
    return next((line for line in console.file.getvalue().splitlines() if f" {name} " in line), None)


def test_engines_are_those_of_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    line = row("rollout engine")
    assert line is not None
    assert all(engine in line for engine in choices("lockstep.rollout.engines"))
    monkeypatch.setattr(doctor, "choices", lambda package: ["embedded", "remote"])
    assert "embedded, remote" in (row("rollout engine") or "")


@pytest.mark.parametrize("package", doctor.UNUSED)
def test_packages_that_are_there_in_vain_are_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: ModuleSpec(name, None) if name == package else None)
    assert "not used by this version" in (row(package) or "")
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert row(package) is None
