"""A process that watches over the one that runs a job on Ray.

When a cluster is lost, Ray ends the process that is connected to it at once, past Python: nobody
there could say what that means. Owns signals on their way to that process, and its exit status.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType

from pagedjax.batch_job.messages import STANDARD_ERROR

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def guarded(run: Callable[[], int], statuses: frozenset[int], lost: int, message: str) -> int:
    """Calls `run` in a process of its own; returns its exit status.

    Args:
      run: must not return before the job is over.
      statuses: that it may have.
      lost: what another one becomes.
      message: said then, with what happened in place of `{how}`.
    """
    alive, watched = os.pipe()  # its second end is this process's alone, and closes with it
    child = os.fork()
    if child == 0:
        os.close(watched)
        _run(run, alive)
    os.close(alive)
    before = {number: signal.signal(number, _pass_on(child)) for number in _SIGNALS}
    try:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(watched)
    if status in statuses:
        return status
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    print(message.format(how=how), file=STANDARD_ERROR)
    return lost


def _run(run: Callable[[], int], alive: int) -> None:
    """The child; does not return."""
    status = 1
    try:
        os.setpgid(0, 0)  # Ctrl-C in a terminal comes through the guard, and once only
        threading.Thread(target=_end_with_guard, args=(alive,), daemon=True).start()
        status = run()
        if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison] (it was closed)
            sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        STANDARD_ERROR.flush()
        os._exit(status)


def _end_with_guard(alive: int) -> None:
    """A guard that is killed takes the job with it, as if there were one process."""
    os.read(alive, 1)  # nothing is ever written: this returns when the other end is closed
    os.kill(os.getpid(), signal.SIGKILL)


def _pass_on(child: int) -> Callable[[int, FrameType | None], None]:
    def handle(number: int, frame: FrameType | None) -> None:
        del frame  # of a signal handler
        os.kill(child, number)

    return handle
