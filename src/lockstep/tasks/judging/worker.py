"""The process that judges: `python -m lockstep.tasks.judging.worker FD`, started and killed by `Judge`.

A process, because a thread that hangs cannot be killed and a signal only reaches the main thread. It builds its own
copy of the task and answers (sample, answer, time limit) with a Verdict until the other end of the pipe is gone.
"""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection

from lockstep.protocols import Task
from lockstep.tasks.judging.verdicts import judged

_GRACE_S = 2.0  # the judge kills at the limit; this much later nobody is left to do it


def serve(connection: Connection) -> None:
    try:
        task: Task = connection.recv()()
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send(None)  # ready
    while True:
        sample, answer, time_limit = connection.recv()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process even inside C code: no orphan runs forever
        signal.setitimer(signal.ITIMER_REAL, time_limit + _GRACE_S)
        verdict = judged(task.reward, sample, answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(verdict)


def main() -> None:
    try:
        serve(Connection(int(sys.argv[1])))
    except (EOFError, ConnectionError):
        return  # the judge is gone


if __name__ == "__main__":
    main()
