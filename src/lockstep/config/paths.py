"""Errors about a path that a user gave, told apart from those of the machine."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.config.base import ConfigError

WRONG_PATH = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENAMETOOLONG,
        errno.ELOOP,
    }
)


@contextmanager
def given_path(failed: str) -> Iterator[None]:
    """Turns an OSError that another path would not have met into a ConfigError: what `failed`, and why.

    A full disk or too many open files are no bad input, and stay what they are.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in WRONG_PATH:
            raise
        raise ConfigError(f"{failed}: {error.strerror}") from None
