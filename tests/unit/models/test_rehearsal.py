"""Where nothing is compiled there is nothing to rehearse. (On a GPU: tests/gpu/test_rehearsal_cuda.py.)"""

from __future__ import annotations

import torch

from lockstep.models.kernels.rehearsal import rehearse


def test_on_a_cpu_nothing_is_rehearsed() -> None:
    done: list[int] = []
    rehearse(lambda: done.append(1), torch.device("cpu"))
    assert done == []
