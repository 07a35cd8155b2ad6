"""What the Gluon kernels share: a ring of stages in shared memory, and its barriers. One warp fills it, others read.

And names that Gluon, which is experimental, changed between the versions of Triton we compile with (3.6 to 3.9).
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))  # of 64 in a row

thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # the threads of this group of warps
async_load = getattr(tma, "async_load", tma.async_copy_global_to_shared)
async_store = getattr(tma, "async_store", tma.async_copy_shared_to_global)
async_gather = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)
_REINTERPRET_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def barriers(STAGES: gl.constexpr, READERS: gl.constexpr, FILLS: gl.constexpr = 1):
    """Of each stage: what fills it, in so many parts, has arrived; all groups of warps that read it are done."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=FILLS)
        mbarrier.init(empty.index(stage), count=READERS)
    fence_async_shared()
    return full, empty


@gluon.jit
def places(tiles, PLACES: gl.constexpr):
    """Shared memory for so many of them."""
    SHAPE: gl.constexpr = tiles.block_type.shape
    return gl.allocate_shared_memory(tiles.dtype, [PLACES, SHAPE[0], SHAPE[1]], tiles.layout)


@gluon.jit
def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr):
    """The same shared memory in another shape."""
    if _REINTERPRET_IS_PUBLIC:
        return memory.reinterpret(dtype, shape, memory.layout)
    else:  # noqa: RET505  one of the two is compiled
        return memory._reinterpret(dtype, shape, memory.layout)
