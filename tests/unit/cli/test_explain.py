"""`lockstep explain` says what the code says, of everything that has a name."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from lockstep.algorithms.config import CORRECTIONS, SURROGATES
from lockstep.algorithms.symbols import legend
from lockstep.assembly.recipe import PRESETS
from lockstep.cli.app import app
from lockstep.cli.catalog import Entry, find, governing_entries, methods, plugin_entry
from lockstep.cli.explain import explain
from lockstep.cli.explainable import FAMILIES, names
from lockstep.cli.introspection import packages
from lockstep.config import ConfigError, choices
from lockstep.metrics import METRICS


def said(name: str | None) -> str:
    console = Console(file=io.StringIO(), width=80)
    explain(name, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def flat(text: str) -> str:
    return " ".join(text.split())


def test_every_folder_of_methods_can_be_explained() -> None:
    """Tasks and engines have pages of their own."""
    assert set(packages()) <= {*FAMILIES, "lockstep.tasks", "lockstep.rollout.engines"}


@pytest.mark.parametrize("entry", methods(), ids=lambda entry: f"{entry.kind}-{entry.name}")
def test_a_method_is_told_within_80_columns(entry: Entry) -> None:
    output = said(entry.name)
    assert f"{entry.name} · {entry.kind}" in output
    assert flat(entry.summary) in flat(output)
    assert all(flat(line) in flat(output) for line in entry.equation)
    assert all(f"{option.name} " in output for option in entry.options)
    assert max(map(cell_len, output.splitlines())) <= 80
    assert "\x1b" not in output, "no colours where there is no terminal"


@pytest.mark.parametrize("entry", methods(), ids=lambda entry: f"{entry.kind}-{entry.name}")
def test_the_source_is_where_it_says(entry: Entry) -> None:
    lines = entry.source.read_text().splitlines()
    if entry.package:
        assert entry.line is not None
        assert any(line.startswith("class ") for line in lines[entry.line - 1 : entry.line + 1])
        assert entry.summary
        assert entry.equation[0]
    else:
        assert PRESETS.path(entry.name) == entry.source


@pytest.mark.parametrize("package", [p for p in FAMILIES if p.startswith("lockstep.algorithms.")])
def test_every_option_of_an_algorithm_says_what_it_means(package: str) -> None:
    for name in choices(package):
        assert all(option.meaning for option in plugin_entry(package, name).options), name


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_metric_is_told(metric) -> None:
    assert flat(metric.meaning) in flat(said(metric.name.replace("*", (*metric.members, "7")[0])))


@pytest.mark.parametrize("entry", governing_entries(), ids=lambda entry: entry.name)
def test_the_governor_is_told(entry: Entry) -> None:
    output = said(entry.name)
    assert f"{entry.name} · governor" in output
    assert flat(entry.summary) in flat(output)
    assert "docs/governor.md" in output
    assert entry.name in names()


def test_a_name_may_stand_for_several_things() -> None:
    assert {entry.kind for entry in find("grpo")} == {"surrogate", "advantage"}
    assert {entry.kind for entry in find("gspo")} == {"preset", "surrogate"}
    assert [entry.name for entry in find("ess")] == ["mismatch/ess"]
    assert {entry.kind for entry in find("k3")} == {"KL estimator", "metric"}


def refused(package: str, name: str) -> set[str]:
    return {other for others, _ in plugin_entry(package, name).refuses for other in others.split(", ")}


def test_refusals_are_those_of_the_recipe() -> None:
    """Each is asked of the validation, so here only that it is asked both ways round."""
    refused = {
        name: [names for names, _ in plugin_entry(SURROGATES, name).refuses] for name in ("ppo_is", "acr", "grpo")
    }
    assert refused["grpo"] == []
    assert "tis" in refused["ppo_is"][0].split(", ")
    assert "tis" not in refused["acr"][0].split(", ")
    assert any("ppo_is" in names.split(", ") for names, _ in plugin_entry(CORRECTIONS, "tis").refuses)
    (reason,) = [reason for names, reason in plugin_entry(SURROGATES, "ppo_is").refuses if ", " in names]
    assert "so that the correction would weigh the mismatch twice" in reason, "it holds for each of them"
    assert plugin_entry("lockstep.algorithms.kl", "k1").refuses[0][0] == 'where = "loss"'


def test_a_preset_is_told_with_its_sources() -> None:
    output = flat(said("qarl-tbpo"))
    assert "neg_high = 7e-4" in output
    assert "App. B, Table 2" in output
    assert "not applied" in output
    assert "\n      # GSM8K, at 1e-5" in said("qurl"), "what goes on in another line is a comment too"


def test_the_list_has_every_name_once_a_family() -> None:
    output = said(None)
    first_words = [line.split()[0] for line in output.splitlines() if line.startswith("  ") and line.split()]
    for entry in methods():
        assert entry.name in first_words
    assert max(map(cell_len, output.splitlines())) <= 80


def test_a_misspelt_name_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="nothing is called 'tbop': did you mean 'tbpo'"):
        find("tbop")
    with pytest.raises(ConfigError, match="nothing is called 'mismatch/k5': did you mean 'mismatch/k"):
        find("mismatch/k5")


def test_the_command() -> None:
    result = CliRunner().invoke(app, ["explain", "tis"], catch_exceptions=False)
    assert "min(w, C) per token" in result.output


def test_shells_are_told_names_without_loading_a_model() -> None:
    """Asked as a shell asks: the words so far, and which of them is being typed."""
    asked = {"_LOCKSTEP_COMPLETE": "complete_bash", "COMP_WORDS": "lockstep explain tb", "COMP_CWORD": "2"}
    code = (
        "import atexit, os, sys; sys.argv = ['lockstep']; from lockstep.cli import main\n"
        "atexit.register(lambda: 'torch' in sys.modules and os._exit(9)); main()"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["tbpo"]
    assert {*PRESETS.names(), *choices(SURROGATES)} <= set(names())


def test_a_symbol_is_not_found_inside_another() -> None:
    assert list(legend("−min(r·A, clip(r, 1−ε, 1+ε)·A); r = exp(ℓ − ℓp)")) == ["ℓ", "ℓp", "r", "A"]
    assert list(legend("r' = exp(ℓ − ℓb)")) == ["ℓ", "ℓb"]
    assert list(legend("max(1, w_max)")) == []


def test_pages_and_terminal_name_the_same_files() -> None:
    root = Path(__file__).parents[3]
    assert all((root / entry.page).is_file() for entry in methods() if entry.page)


def test_the_list_cuts_nothing_off_and_names_a_group_of_metrics_once() -> None:
    output = said(None)
    assert "…" not in output
    groups = [line.split()[0] for line in output.splitlines() if line.startswith("  ") and "/ " in line]
    assert len(groups) == len(set(groups)) == len({metric.name.partition("/")[0] for metric in METRICS})
