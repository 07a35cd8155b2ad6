"""What tests of Triton kernels have in common: on a GPU, or in float32 by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from lockstep.models import kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not kernels.available(DEVICE), reason="needs a CUDA device, or triton's interpreter"),
]
