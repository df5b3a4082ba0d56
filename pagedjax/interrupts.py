"""Ctrl-C at a safe moment: between two steps, when pages, queues and donated buffers are whole."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class DeferredInterrupt:
    """While open, a first Ctrl-C is kept until `check`; a second one is raised at once.

    An interrupt in the middle of a step loses buffers that were donated to it; what ran is then
    computed again. Does nothing outside the main thread, and nothing where the program has a
    handler of its own.
    """

    def __init__(self) -> None:
        """Installs nothing yet."""
        self._is_pending = False
        self._is_installed = False

    def check(self) -> None:
        """Raises `KeyboardInterrupt` if one came since the last check."""
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

    def __enter__(self) -> DeferredInterrupt:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._is_installed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind is None:
            self.check()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_pending:
            signal.default_int_handler(number, frame)
        self._is_pending = True
