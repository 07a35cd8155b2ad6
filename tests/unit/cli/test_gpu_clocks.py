"""Power and clocks, read from a script that takes the place of `nvidia-smi`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lockstep.cli.gpu_clocks import Sample, means, sampled

UUID = "5f3c3fd3-1a2b-4c5d-8e9f-000102030405"
GPU = torch.device("cuda")
ENDLESS = "while :; do echo '683.20, 1455'; sleep 0.02; done"

Tool = Callable[[str], Path]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Makes a script the `nvidia-smi` of this test; it leaves its process id and its arguments in the folder."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))

    def make(script: str) -> Path:
        path = tmp_path / "nvidia-smi"
        path.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\necho $$ > {tmp_path}/pid\n{script}\n')
        path.chmod(0o755)
        return tmp_path

    return make


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def written(path: Path) -> bool:
    return path.exists() and path.read_text().endswith("\n")


def is_gone(folder: Path) -> bool:
    """Neither the script nor what it started is running; who is dead may wait for somebody to ask."""
    group = (folder / "pid").read_text().strip()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ends while we look
            state, _, its_group, *_ = path.read_text().rpartition(")")[2].split()
            if its_group == group and state != "Z":
                return False
    return True


def test_samples_come_while_the_block_lasts(tool: Tool) -> None:
    folder, begun = tool(ENDLESS), time.monotonic()
    with sampled(GPU) as samples:
        wait_for(lambda: len(samples) >= 3)
    assert {(s.watts, s.mhz) for s in samples} == {(683.2, 1455.0)}
    assert begun < samples[0].at < samples[1].at < time.monotonic()
    wait_for(lambda: is_gone(folder))


def test_the_device_is_named_by_its_uuid(tool: Tool) -> None:
    folder = tool("echo 1, 2")
    with sampled(GPU) as samples:
        wait_for(lambda: samples)
    assert f"--id=GPU-{UUID} " in (folder / "arguments").read_text()


def test_what_never_prints_has_no_samples_and_ends(tool: Tool) -> None:
    folder = tool("sleep 600")
    with sampled(GPU) as samples:
        wait_for(lambda: written(folder / "pid"))
    assert not samples
    wait_for(lambda: is_gone(folder))


@pytest.mark.usefixtures("tool")
def test_without_the_tool_there_are_no_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with sampled(GPU) as samples:
        assert not samples


def test_a_tool_that_cannot_be_run_is_none(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tool(ENDLESS)
    (folder / "nvidia-smi").chmod(0o644)
    monkeypatch.setenv("PATH", str(folder))
    with sampled(GPU) as samples:
        assert not samples


def test_without_a_gpu_nothing_is_started(tool: Tool) -> None:
    folder = tool(ENDLESS)
    with sampled(torch.device("cpu")) as samples:
        assert not samples
    assert not (folder / "pid").exists()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("[N/A], [N/A]", (None, None)),
        ("[N/A], 1980", (None, 1980.0)),
        ("554.10, [Unknown Error]", (554.1, None)),
        ("No devices were found", (None, None)),
        ("", (None, None)),
    ],
)
def test_what_the_driver_does_not_say_is_unknown(
    line: str, found: tuple[float | None, float | None], tool: Tool
) -> None:
    tool(f"echo '{line}'; exit 9")
    with sampled(GPU) as samples:
        wait_for(lambda: samples)
    assert means(samples, 0.0, time.monotonic()) == found


def test_the_tool_ends_with_an_exception(tool: Tool) -> None:
    folder = tool(ENDLESS)

    def fail() -> None:
        with sampled(GPU) as samples:
            wait_for(lambda: samples)
            raise RuntimeError("an engine failed")

    with pytest.raises(RuntimeError, match="an engine failed"):
        fail()
    wait_for(lambda: is_gone(folder))


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_tool_ends_with_the_process_that_reads_it(sent: signal.Signals, tool: Tool) -> None:
    folder = tool(ENDLESS)
    program = f"""
import time, types, torch
from lockstep.cli.gpu_clocks import sampled
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid="{UUID}")
with sampled(torch.device("cuda")) as samples:
    while not samples:
        time.sleep(0.01)
    print("sampling", flush=True)
    time.sleep(600)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "sampling\n"
        process.send_signal(sent)
        process.wait(20)
    wait_for(lambda: is_gone(folder))


def test_means_are_of_the_samples_in_between() -> None:
    samples = [
        Sample(1.0, 100.0, 300.0),
        Sample(2.0, 600.0, 1500.0),
        Sample(3.0, 700.0, None),
        Sample(4.0, 90.0, 200.0),
    ]
    assert means(samples, 2.0, 3.5) == (650.0, 1500.0)
    assert means(samples, 2.1, 2.9) == (None, None)
