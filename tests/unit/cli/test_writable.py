from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.cli.options import require_folder, require_replaceable, require_writable
from lockstep.config import ConfigError
from lockstep.report.run_folder import RunFolder


def test_asking_whether_one_may_write_changes_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "kept.md"
    kept.write_text("precious")
    require_writable(kept, None, tmp_path / "new.md")
    require_replaceable(kept)
    require_replaceable(tmp_path / "new.md")
    require_folder(tmp_path)
    require_folder(tmp_path / "to/be/made")
    assert list(tmp_path.iterdir()) == [kept]
    assert kept.read_text() == "precious"


def test_a_link_to_nothing_still_points_to_nothing(tmp_path: Path) -> None:
    link = tmp_path / "link.md"
    link.symlink_to("target.md")
    require_writable(link)
    assert list(tmp_path.iterdir()) == [link]
    assert link.is_symlink()


def test_one_file_cannot_hold_two_things(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("page.md")
    with pytest.raises(ConfigError, match=r"page\.md is named twice"):
        require_writable(tmp_path / "page.md", None, tmp_path / "link")
    assert not (tmp_path / "page.md").exists()


def test_links_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "lost").symlink_to("gone/target.md")
    with pytest.raises(ConfigError, match=r"cannot write .*loop: Too many levels"):
        require_writable(tmp_path / "loop")
    with pytest.raises(ConfigError, match=r"cannot write .*lost: No such file"):
        require_writable(tmp_path / "lost")
    with pytest.raises(ConfigError, match=r"cannot write into the folder .*lost/x: No such file"):
        require_folder(tmp_path / "lost/x")


def test_only_what_is_appended_to_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is replaced whole may be read-only."""
    page = tmp_path / "page.html"
    page.touch()

    def refuses(path: Path, *mode: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refuses)
    require_replaceable(page)
    with pytest.raises(ConfigError, match="Permission denied"):
        require_writable(page)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EMFILE])
@pytest.mark.parametrize(
    ("check", "uses"),
    [
        (require_writable, "pathlib.Path.open"),
        (require_replaceable, "lockstep.cli.options.NamedTemporaryFile"),
        (require_folder, "lockstep.cli.options.mkdtemp"),
        (RunFolder.create, "pathlib.Path.touch"),
    ],
)
def test_what_is_no_fault_of_the_path_is_no_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Callable[[Path], object], uses: str, number: int
) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(uses, fails)
    with pytest.raises(OSError, match=os.strerror(number)) as raised:
        check(tmp_path / "new")
    assert raised.value.errno == number
