"""The command `lockstep`. Exit codes: 0 done, 1 failed, 2 bad input, 3 stopped by the governor, 130 by a signal (of
`bench rollout`, 128 and its number)."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from lockstep.config import ConfigError

FAILED, BAD_INPUT, GOVERNED, STOPPED = 1, 2, 3, 130
_BY_SIGNALS = (128 + signal.SIGTERM, 128 + signal.SIGHUP)  # of commands that have processes of their own to end
_STOPPED_LINE = "stopped; what was saved before is whole"


def main() -> NoReturn:
    """Ends the process with the command's exit code.

    One of several ranks ends at once: taking process groups apart while the interpreter ends aborts now and then, and
    torchrun would call a run that is done and saved a failure.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:  # else who is to end may be waiting for another rank, and would not hear of it
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, where a command takes no signals itself
    code = run()
    _flush()
    if ranks > 1:
        os._exit(code)
    sys.exit(code)


def _flush() -> None:
    """Where nobody reads any more, what is left would fail when the interpreter ends, and change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


def run() -> int:
    """Bad input, what the system refuses and a diverged model are told in one line; anything else is a bug, with its
    traceback. Paths that a user gave are checked by the command: here they could not be told from others."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # PyTorch reads it once: large tensors of a CPU in large pages
    from lockstep.assembly.outcome import Governed, Interrupted
    from lockstep.cli.app import app
    from lockstep.controller.audit import AuditFailed

    try:
        app()
    except SystemExit as done:  # Ctrl-C, too: the command line's own way of ending by it
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
        return _tell(_STOPPED_LINE, code) if code in (STOPPED, *_BY_SIGNALS) else code
    except Interrupted as stop:
        return _tell(f"{stop}; go on with: lockstep train --resume {stop.root}", STOPPED)
    except Governed as stop:
        return _tell(f"{stop}\nsaved; {stop.root}/report.html shows it; --resume {stop.root} goes on", GOVERNED)
    except ConfigError as error:
        return _tell(f"error: {error}", BAD_INPUT)
    except OSError as error:
        return _tell(f"error: {_in_words(error)}", FAILED)
    except (FloatingPointError, AuditFailed) as error:
        return _tell(f"error: {error}", FAILED)
    except KeyboardInterrupt:
        return _tell(_STOPPED_LINE, STOPPED)
    return 0


def _in_words(error: OSError) -> str:
    """One line: the path, or both of a rename, and the reason; a library's may have a text alone, or nothing at all."""
    if error.filename is None:
        return " ".join(str(error).split()) or type(error).__name__
    reason = error.strerror or (os.strerror(error.errno) if error.errno else type(error).__name__)
    paths = " -> ".join(str(path) for path in (error.filename, error.filename2) if path is not None)
    return f"{paths}: {reason}"


def _tell(line: str, code: int) -> int:
    with suppress(OSError):  # nobody may be listening
        print(line, file=sys.stderr)
    return code
