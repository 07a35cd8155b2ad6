from __future__ import annotations

import pytest

from lockstep.cli.options import bytes_text


@pytest.mark.parametrize(
    ("num", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (396 * 2**10, "396 KiB"),
        (1.625 * 2**20, "1.62 MiB"),
        (15.3 * 2**30, "15.3 GiB"),
        (2000 * 2**30, "2,000 GiB"),
    ],
)
def test_sizes_have_the_unit_they_can_be_read_in(num: float, text: str) -> None:
    assert bytes_text(num) == text
