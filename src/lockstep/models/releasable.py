"""Memory that can be given back for a while, and comes back at the same addresses without its content.

On a GPU a range of addresses is reserved once and has physical memory behind it only while it is wanted; what a CUDA
graph has captured stays valid. PyTorch has no interface to that part of the CUDA driver, so it is called directly. On a
CPU, where nothing is captured, the same tensors are emptied and filled again.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

ALIGNMENT = 512  # bytes, as PyTorch's own allocator has it


class _Block(Protocol):
    """One piece of memory: `bytes` is a tensor over all of it, which nobody may touch while it is released."""

    bytes: Tensor

    def release(self) -> None: ...

    def restore(self) -> None: ...


class Releasable:
    """Tensors that lose their memory together. Not for several threads at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.released = False
        self._blocks: list[_Block] = []

    @property
    def num_bytes(self) -> int:
        """What is given back by a release."""
        return sum(len(block.bytes) for block in self._blocks)

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        block = _MappedBlock.make(num_bytes, self.device) if self.device.type == "cuda" else _HostBlock.make(num_bytes)
        self._blocks.append(block)
        block.bytes.zero_()
        return block.bytes[:num_bytes].view(dtype).view(shape)

    @torch.no_grad()
    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Moves tensors here, in place and with their content; those that overlap go on doing so."""
        tensors = list(tensors)
        sources = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        places, end = dict[int, int](), 0
        for address, storage in sources.items():
            places[address], end = end, end + -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        arena = self.zeros(end, dtype=torch.uint8)
        for address, storage in sources.items():
            content = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            arena[places[address] :][: len(content)] = content
        for tensor in {id(t): t for t in tensors}.values():  # tied weights are one tensor with two names
            first = places[tensor.untyped_storage().data_ptr()] // tensor.element_size() + tensor.storage_offset()
            tensor.set_(arena.untyped_storage(), first, tensor.size(), tensor.stride())

    def holds(self, tensor: Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return any(block.bytes.untyped_storage().data_ptr() == address for block in self._blocks)

    def release(self) -> None:
        """Waits for the device. Until `restore` none of these tensors may be read or written."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for block in self._blocks:
            block.release()
        self.released = True

    def restore(self) -> None:
        """With zeros. Takes back what PyTorch keeps without using it; MemoryError, and nothing taken, if there is too
        little even then."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            for block in self._blocks:
                block.restore()
        except MemoryError:
            self.release()
            raise
        for block in self._blocks:
            block.bytes.zero_()
        self.released = False


@dataclass(slots=True)
class _HostBlock:
    bytes: Tensor
    num_bytes: int

    @classmethod
    def make(cls, num_bytes: int) -> _HostBlock:
        return cls(torch.empty(num_bytes, dtype=torch.uint8), num_bytes)

    def release(self) -> None:
        self.bytes.untyped_storage().resize_(0)

    def restore(self) -> None:
        self.bytes.untyped_storage().resize_(self.num_bytes)


@dataclass(slots=True)
class _Range:
    """Addresses of a GPU, with memory behind them if there is a `handle`."""

    device: int
    address: int
    num_bytes: int
    handle: int | None = None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """How PyTorch makes a tensor of it, without a copy."""
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def map(self) -> None:
        if self.handle is not None:
            return
        driver, handle, where = _driver(), ctypes.c_uint64(), _Properties.on(self.device)
        driver.call("cuMemCreate", ctypes.byref(handle), self.num_bytes, ctypes.byref(where), 0)
        try:
            driver.call("cuMemMap", self.address, self.num_bytes, 0, handle.value, 0)
        except (MemoryError, RuntimeError):
            driver.call("cuMemRelease", handle.value)
            raise
        self.handle = handle.value
        access = _Access(where.location, READ_WRITE)
        driver.call("cuMemSetAccess", self.address, self.num_bytes, ctypes.byref(access), 1)

    def unmap(self) -> None:
        if self.handle is None:
            return
        _driver().call("cuMemUnmap", self.address, self.num_bytes)
        _driver().call("cuMemRelease", self.handle)
        self.handle = None

    def __del__(self) -> None:
        """When no tensor is left; kernels may still be at work on it. The end of the process frees it by itself."""
        if not sys.is_finalizing():
            torch.cuda.synchronize(self.device)
            self.unmap()
            _driver().call("cuMemAddressFree", self.address, self.num_bytes)


@dataclass
class _MappedBlock:
    bytes: Tensor
    range: _Range

    @classmethod
    def make(cls, num_bytes: int, device: torch.device) -> _MappedBlock:
        torch.cuda.synchronize(device)  # this thread now has the device's context
        torch.cuda.empty_cache()  # what PyTorch keeps without using it, the driver cannot give to us
        driver, address, size = _driver(), ctypes.c_uint64(), ctypes.c_size_t()
        index = torch.cuda.current_device() if device.index is None else device.index
        where = _Properties.on(index)
        driver.call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(where), 0)
        whole = max(1, -(-num_bytes // size.value)) * size.value
        driver.call("cuMemAddressReserve", ctypes.byref(address), whole, 0, 0, 0)
        range = _Range(index, address.value, whole)
        range.map()
        tensor = torch.as_tensor(range, device=torch.device("cuda", index))
        return cls(tensor, range)  # the tensor's memory keeps its range alive too

    def release(self) -> None:
        self.range.unmap()

    def restore(self) -> None:
        self.range.map()


OUT_OF_MEMORY = 2
PINNED, ON_DEVICE, READ_WRITE = 1, 1, 3


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )

    @classmethod
    def on(cls, device: int) -> _Properties:
        return cls(type=PINNED, location=_Location(ON_DEVICE, device))


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


SIGNATURES: dict[str, tuple[type, ...]] = {
    "cuMemGetAllocationGranularity": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
    "cuMemAddressReserve": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64),
    "cuMemAddressFree": (ctypes.c_uint64, ctypes.c_size_t),
    "cuMemCreate": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint64),
    "cuMemRelease": (ctypes.c_uint64,),
    "cuMemMap": (ctypes.c_uint64, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64),
    "cuMemUnmap": (ctypes.c_uint64, ctypes.c_size_t),
    "cuMemSetAccess": (ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t),
}


class _Driver:
    """libcuda, which PyTorch has loaded by the time there is a device."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        for name, arguments in SIGNATURES.items():
            getattr(self._library, name).argtypes = arguments

    def call(self, name: str, *arguments: Any) -> None:
        """MemoryError if the device has too little, RuntimeError for everything else."""
        code = getattr(self._library, name)(*arguments)
        if code:
            said = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(said))
            kind = MemoryError if code == OUT_OF_MEMORY else RuntimeError
            raise kind(f"{name}: {(said.value or b'unknown').decode()} (CUDA error {code})")


@cache
def _driver() -> _Driver:
    return _Driver()
