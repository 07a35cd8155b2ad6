"""Classes by name, and names by class."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.algorithms.config import CORRECTIONS
from lockstep.config import choices
from lockstep.config.plugins import load_class, name_of


class Mine: ...


@pytest.mark.parametrize("name", [*choices(CORRECTIONS), f"{Path(__file__)}:Mine", "collections:Counter"])
def test_a_class_goes_by_the_name_it_was_loaded_by(name: str) -> None:
    assert name_of(load_class(CORRECTIONS, name)) == name
