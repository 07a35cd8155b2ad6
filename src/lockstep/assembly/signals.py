"""Signals that end a run: after the update under way, with everything saved."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignore_signals() -> None:
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """The first one calls `stop`, the second ends the process at once; but not SIGHUP, of which a terminal that closes
    sends several: after the first it is ignored, to the end. Where it was before, as by `nohup`, it stays so."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in ENDING}
    heeded = [number for number in ENDING if number != signal.SIGHUP or before[number] is not signal.SIG_IGN]
    terminals = [descriptor for descriptor in range(3) if os.isatty(descriptor)]

    def end(number: signal.Signals) -> None:
        release()
        stop()
        if number == signal.SIGHUP:
            before[number] = signal.SIG_IGN
            _let_go_of(terminals)

    def release() -> None:
        for number in heeded:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.default_int_handler)

    for number in heeded:
        loop.add_signal_handler(number, end, number)
    try:
        yield
    finally:
        release()
        for number in heeded:
            handler = before[number]
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _let_go_of(terminals: Iterable[int]) -> None:
    """They are gone: to write there would fail, before anything is saved."""
    with suppress(OSError), open(os.devnull, "r+b", buffering=0) as nowhere:
        for descriptor in terminals:
            os.dup2(nowhere.fileno(), descriptor)
