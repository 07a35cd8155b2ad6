"""How a format and its options are named on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli.exporting import parse_format
from lockstep.config import ConfigError

OWN = """
from dataclasses import dataclass

@dataclass
class Mine:
    groups: int = 1
"""


def test_options_of_a_format_follow_its_name() -> None:
    assert parse_format("fp8_w8a8").options == {}
    assert parse_format("fp8_w8a8:block=true").build().block is True


def test_a_class_of_the_users_own_keeps_its_colon(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    assert parse_format(f"{file}:Mine").name == f"{file}:Mine"
    assert parse_format(f"{file}:Mine:groups=4").build().groups == 4


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("fp8_w8a8:blok=true", r"unknown option of fp8_w8a8 'blok': did you mean 'block'\? choices: block"),
        ("fp8_w8a8:block=4x", r"fp8_w8a8.block: must be true or false \(got '4x'\)"),
        ("fp9:block=true", r"unknown format 'fp9': .*choices: fp8_w8a8, int8_w8a8, w4a16, w4a8"),
        ("w4a16:group=64", r"w4a16 has no options, not 'group'"),
    ],
)
def test_what_is_no_format_or_no_option_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_format(text)
