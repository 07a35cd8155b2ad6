"""Compiles the kernels that a piece of work launches, side by side, before it is run.

Triton compiles a kernel when it is first launched, one after the other, and a first start launches two dozen. In a
rehearsal the same code runs, but a launch only hands its kernel to one of a few threads: most of a compilation happens
outside of Python. What kernels would have written is zero, so that whatever is looked up by it exists; what `work`
writes there by other means is written.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from lockstep.models import kernels

MOST_THREADS = 8
EMPTY = (  # what makes tensors for kernels to write
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (Tensor, "new_empty"),
    (Tensor, "new_empty_strided"),
)
_rehearsing = ContextVar("rehearsing", default=False)  # by thread: what others launch meanwhile is run
_one_at_a_time = threading.Lock()


def rehearse(work: Callable[[], object], device: torch.device) -> None:
    """Returns when everything that `work` launches is ready to run; where nothing is compiled, at once.

    What does not compile says so when it is run."""
    if device.type != "cuda" or not kernels.available(device):
        return
    assert not _rehearsing.get(), "a rehearsal within another would wait for it"
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    token = _rehearsing.set(True)
    try:
        with _one_at_a_time, ExitStack() as stack:
            _replace(stack, JITFunction, "run", _compiling)
            for owner, name in EMPTY:
                _replace(stack, owner, name, _zeroed)
            stack.enter_context(AsyncCompileMode(stack.enter_context(_Workers()), ignore_errors=True))
            work()
    finally:
        _rehearsing.reset(token)


def _replace(stack: ExitStack, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    before = getattr(owner, name)
    setattr(owner, name, wrap(before))
    stack.callback(setattr, owner, name, before)


def _compiling(launch: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        rehearsing = _rehearsing.get()
        kernel = launch(self, *args, grid=grid, warmup=warmup or rehearsing, **options)
        future = getattr(kernel, "future", None) if rehearsing else None
        if future is not None and future.done() and future.exception() is None:
            kernel.result()  # is put where the next launch looks first
        return kernel

    return run


def _zeroed(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def zeros(*args: Any, **options: Any) -> Tensor:
        result = empty(*args, **options)
        if _rehearsing.get():
            result.detach().zero_()
        return result

    return zeros


class _Workers(ThreadPoolExecutor):
    """Compile a kernel and load it: before version 3.7, Triton builds a launcher in C for that."""

    def __init__(self) -> None:
        threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        super().__init__(threads, "compile", initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def compile_and_load() -> Any:
            kernel = fn(*args, **kwargs)
            kernel.run  # noqa: B018  a property, which loads it
            return kernel

        return super().submit(compile_and_load)
