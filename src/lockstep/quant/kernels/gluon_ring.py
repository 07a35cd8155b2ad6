"""What the Gluon kernels share: the barriers of a ring of stages in shared memory. One warp fills them, others read."""

# pyright: reportMissingImports=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier


@gluon.jit
def barriers(STAGES: gl.constexpr, READERS: gl.constexpr):
    """Of each stage: its tiles have arrived; all groups of warps that read them are done with them."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=READERS)
    fence_async_shared()
    return full, empty
