"""On a GPU with `nvidia-smi`: a busy device draws power, and its clock runs."""

from __future__ import annotations

import shutil
import time

import pytest
import torch

from lockstep.cli.gpu_clocks import means, sampled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not shutil.which("nvidia-smi"), reason="needs nvidia-smi"),
]


def test_a_busy_device_has_power_and_clock() -> None:
    a = torch.randn(4096, 4096, device="cuda")
    begun = time.monotonic()
    with sampled(torch.device("cuda")) as samples:
        while len(samples) < 5 and time.monotonic() < begun + 20:
            a = torch.nn.functional.normalize(a @ a)
            torch.cuda.synchronize()
    watts, mhz = means(samples, begun, time.monotonic())
    assert watts is not None
    assert mhz is not None
    assert 20 < watts < 3000
    assert 100 < mhz < 5000
