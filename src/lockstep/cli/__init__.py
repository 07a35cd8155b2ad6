"""The command `lockstep`. Exit codes: 0 done, 1 failed, 2 bad input, 3 stopped by the governor, 130 by a signal."""

from __future__ import annotations

import errno
import os
import sys
from typing import NoReturn

from lockstep.config import ConfigError

FAILED, BAD_INPUT, GOVERNED, STOPPED = 1, 2, 3, 130
# Of a path that was given; a full disk is none of them.
WRONG_PATH = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
}


def main() -> NoReturn:
    """Ends the process with the command's exit code.

    One of several ranks ends at once: taking process groups apart while the interpreter ends aborts now and then, and
    torchrun would call a run that is done and saved a failure.
    """
    code = run()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run() -> int:
    """Bad input, a full disk and a diverged model are told in one line; anything else is a bug, with its traceback."""
    from lockstep.assembly.outcome import Governed, Interrupted
    from lockstep.cli.app import app
    from lockstep.controller.audit import AuditFailed

    try:
        app()
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except Interrupted as stop:
        return _tell(f"{stop}; go on with: lockstep train --resume {stop.root}", STOPPED)
    except Governed as stop:
        return _tell(f"{stop}\nsaved; {stop.root}/report.html shows it; --resume {stop.root} goes on", GOVERNED)
    except ConfigError as error:
        return _tell(f"error: {error}", BAD_INPUT)
    except OSError as error:
        line = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return _tell(f"error: {line}", BAD_INPUT if error.errno in WRONG_PATH else FAILED)
    except (FloatingPointError, AuditFailed) as error:
        return _tell(f"error: {error}", FAILED)
    except KeyboardInterrupt:
        return _tell("stopped at once, without saving; the last checkpoint is whole", STOPPED)
    return 0


def _tell(line: str, code: int) -> int:
    print(line, file=sys.stderr)
    return code
