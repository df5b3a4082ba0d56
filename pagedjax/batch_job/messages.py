"""Messages for the user, on standard error; that nobody reads them ends no job.

Owns the stream that bars, log lines and messages go through: who read it may be gone (`2>&1 | head`
or a Ctrl-C that ended `tee`, too), and a service may have been started without any.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

from tqdm import tqdm


class _StandardError:
    """Whatever `sys.stderr` is at the moment. What it does not take is dropped."""

    def write(self, text: str) -> int:
        """Writes, or does not."""
        self._try(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flushes, or does not."""
        self._try(lambda stream: stream.flush())

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)  # `isatty`, `fileno`, `encoding`

    def _try(self, use: Callable[[TextIO], object]) -> None:
        with suppress(OSError, ValueError):  # ValueError: it was closed
            use(sys.stderr)


STANDARD_ERROR: Any = _StandardError()


def say(text: str) -> None:
    """A message for the user, above a bar if there is one."""
    tqdm.write(f"serve_batch: {text}", file=STANDARD_ERROR)


def fill_closed_streams() -> None:
    """Opens the null device under the numbers of standard streams that are closed.

    A file that the job opens would get that number, and messages from the outside of Python.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison] (Python does that)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace")
