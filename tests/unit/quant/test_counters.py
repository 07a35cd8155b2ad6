"""Counters that products find each other by: one set for each thread, and one for each capture."""

from __future__ import annotations

import threading

import pytest
import torch

from lockstep.models import few_rows
from lockstep.models.few_rows import for_capture
from lockstep.quant.kernels.counters import Counters, counted_by, counters

CPU = torch.device("cpu")


def test_a_thread_keeps_its_own() -> None:
    others = list[torch.Tensor]()
    thread = threading.Thread(target=lambda: others.append(counters(CPU)))
    thread.start()
    thread.join()
    assert counters(CPU) is counters(CPU)
    assert others[0] is not counters(CPU)


def test_a_capture_brings_its_own_and_leaves_the_threads() -> None:
    before, own = counters(CPU), Counters()
    with counted_by(own):
        assert counters(CPU) is own[CPU] is not before
    assert counters(CPU) is before
    with counted_by(own):
        assert counters(CPU) is own[CPU]


def test_a_capture_within_another_ends_alone() -> None:
    with for_capture({}):
        with pytest.raises(RuntimeError, match="stop"), for_capture({}):
            raise RuntimeError("stop")
        assert few_rows._thread.captures
    assert not few_rows._thread.captures
