"""What the pages promise holds: links lead somewhere, commands validate, the example of a task runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.assembly.recipe import Recipe
from lockstep.cli import recipe_files
from lockstep.config import load

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")
TRAIN = re.compile(r"lockstep train (\w+)((?: [\w.]+=[^\s`]+)*)")
BLOCK = re.compile(r"```\w+\n# ([\w.]+)[^\n]*\n(.*?)```", re.DOTALL)  # code whose first line is a file's name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not missing


def test_commands_of_the_pages_validate() -> None:
    packaged = {path.stem: path for path in recipe_files.packaged()}
    commands = {found for page in PAGES for found in TRAIN.findall(page.read_text()) if found[0] in packaged}
    assert commands
    for recipe, overrides in commands:
        load(Recipe, packaged[recipe], overrides.split())


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that docs/writing-a-task.md shows, where its commands would find them."""
    for name, text in BLOCK.findall((ROOT / "docs/writing-a-task.md").read_text()):
        (tmp_path / name).write_text(text)
    subprocess.run([sys.executable, "letters.py"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_example_of_a_task_does_what_the_page_says(example: Path) -> None:
    task = load(Recipe, example / "sorting.toml").task.build()
    sample = next(s for s in task.samples("train") if s.messages[0].content != s.answer)
    assert task.reward(sample, sample.answer).value == 1.2
    assert task.reward(sample, sample.answer + "a").value < 0.2
    assert {len(s.answer) for s in task.demonstrations()} == {3}
    assert max(len(s.answer) for s in task.samples("eval")) == 6


def test_made_up_problems_of_the_page_are_the_same_every_time(example: Path) -> None:
    overrides = ['task={name="sums.py:Sums", largest=5}']
    first, again = (load(Recipe, example / "sorting.toml", overrides).task.build() for _ in range(2))
    assert first.samples("eval") == again.samples("eval")
    assert all(first.reward(s, s.answer) for s in first.demonstrations())


def test_readme_shows_the_same_example() -> None:
    readme, page = (dict(BLOCK.findall((ROOT / name).read_text())) for name in ("README.md", "docs/writing-a-task.md"))
    assert {"letters.py", "sorting.py", "sorting.toml"} <= readme.keys()
    assert all(page[name] == text for name, text in readme.items())


def test_word_sums_of_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "examples")
    task = load(Recipe, Path("word_sums.toml")).task.build()
    held_out, trained = (task.samples(split) for split in ("eval", "train"))
    assert len(held_out) == 512
    assert not {s.messages for s in held_out} & {s.messages for s in trained}
    for sample in held_out:
        assert task.reward(sample, f"First 12, so it is {sample.answer}.").correct
        assert not task.reward(sample, f"It is {sample.answer}, no, {int(sample.answer) + 1}.").correct
    repeated = [task.reward(sample, sample.messages[0].content).correct for sample in held_out]
    assert sum(repeated) < 5, "the question is an answer only where its last number is, as in 60 - 30"
