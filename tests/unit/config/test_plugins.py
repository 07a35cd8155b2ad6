"""Classes by name, and names by class."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lockstep.algorithms.config import CORRECTIONS
from lockstep.config import choices
from lockstep.config.plugins import load_class, name_of


class Mine: ...


@pytest.mark.parametrize("name", [*choices(CORRECTIONS), f"{Path(__file__)}:Mine", "collections:Counter"])
def test_a_class_goes_by_the_name_it_was_loaded_by(name: str) -> None:
    assert name_of(load_class(CORRECTIONS, name)) == name


def test_a_file_may_import_its_neighbour_and_no_library_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [place for place in sys.path if place])  # as an installed command has it
    (tmp_path / "beside_mine.py").write_text("class Base: ...")
    (tmp_path / "json.py").write_text("raise AssertionError('this is not the library')")
    (tmp_path / "mine.py").write_text("import json\nfrom beside_mine import Base\nclass Mine(Base): ...")
    assert load_class(CORRECTIONS, f"{tmp_path / 'mine.py'}:Mine").__base__.__name__ == "Base"
