"""Power and clock of a GPU while something runs on it, whichever process that is: `nvidia-smi`, read by a thread.

A board at its power cap lowers its clock, and everything that computes runs slower by as much.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from statistics import fmean
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from threading import Thread

import torch

QUERY = "power.draw.instant,clocks.sm"  # plain power.draw is the mean of a whole second, longer than some runs
PERIOD = 100  # milliseconds
PATIENCE = 5.0  # seconds: after a fault of the driver the tool cannot even be killed


@dataclass(frozen=True, slots=True)
class Sample:
    at: float  # time.monotonic(), which is the same clock in every process
    watts: float | None  # None: the driver does not say
    mhz: float | None  # of the multiprocessors


@contextmanager
def sampled(device: torch.device) -> Iterator[Sequence[Sample]]:
    """What the device draws and how fast it runs, one sample after the other while the block lasts. There are none
    without a GPU or `nvidia-smi`, or where that has nothing to say."""
    samples: list[Sample] = []
    process = _start(device) if device.type == "cuda" else None
    if process is None:
        yield samples
        return
    reader = Thread(target=_read, args=(process.stdout, samples), daemon=True)
    reader.start()
    try:
        yield samples
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # with what it started, which would hold the pipe open
        reader.join(PATIENCE)
        with suppress(TimeoutExpired):
            process.wait(PATIENCE)


def means(samples: Iterable[Sample], begun: float, ended: float) -> tuple[float | None, float | None]:
    """Watts and MHz from one time to another; None where there is no sample."""
    within = [sample for sample in samples if begun <= sample.at <= ended]
    return _mean(sample.watts for sample in within), _mean(sample.mhz for sample in within)


def _start(device: torch.device) -> Popen[str] | None:
    """In a process group of its own; it dies of its pipe if we are killed. None: there is no such tool."""
    uuid = torch.cuda.get_device_properties(device).uuid  # its number is another one under CUDA_VISIBLE_DEVICES
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    command += [f"--loop-ms={PERIOD}"]
    try:
        return Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, text=True, process_group=0)
    except OSError:
        return None


def _read(lines: Iterable[str], samples: list[Sample]) -> None:
    for line in lines:
        watts, _, mhz = line.partition(",")
        samples.append(Sample(time.monotonic(), _number(watts), _number(mhz)))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]", or a complaint
        return None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
