from __future__ import annotations

from pathlib import Path

from lockstep.cli.options import require_folder, require_writable


def test_asking_whether_one_may_write_changes_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "kept.md"
    kept.write_text("precious")
    require_writable(kept, None, tmp_path / "new.md")
    require_folder(tmp_path)
    require_folder(tmp_path / "to/be/made")
    assert list(tmp_path.iterdir()) == [kept]
    assert kept.read_text() == "precious"
