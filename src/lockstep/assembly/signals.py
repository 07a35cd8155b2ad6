"""Signals that end a run: after the update under way, with everything saved."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignore_signals() -> None:
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """The first one calls `stop`, the second ends the process at once. One that is ignored stays so, as by `nohup`."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in ENDING}
    heeded = [number for number, handler in before.items() if handler is not signal.SIG_IGN]

    def end(number: signal.Signals) -> None:
        if number == signal.SIGHUP:
            _let_go_of_terminal()
        release()
        stop()

    def release() -> None:
        for number in heeded:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.default_int_handler)

    for number in heeded:
        loop.add_signal_handler(number, end, number)
    try:
        yield
    finally:
        release()
        for number in heeded:
            handler = before[number]
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _let_go_of_terminal() -> None:
    """It is gone: to write to it would fail, before anything is saved."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        if stat.S_ISCHR(os.fstat(stream).st_mode):
            os.dup2(nowhere, stream)
    os.close(nowhere)
