"""The command `lockstep`. Exit codes: 0 done, 1 the run failed, 2 bad input, 130 stopped and saved."""

from __future__ import annotations

import sys

from lockstep.config import ConfigError

FAILED, BAD_INPUT, STOPPED = 1, 2, 130


def main() -> None:
    """Bad input, a full disk and a diverged model are told in one line; anything else is a bug, with its traceback."""
    from lockstep.assembly.outcome import Interrupted
    from lockstep.cli.app import app

    try:
        app()
    except Interrupted as stop:
        print(f"{stop}; go on with: lockstep train --resume {stop.root}", file=sys.stderr)
        sys.exit(STOPPED)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    except (OSError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(FAILED)
    except KeyboardInterrupt:
        print("stopped at once, without saving; the last checkpoint is whole", file=sys.stderr)
        sys.exit(STOPPED)
