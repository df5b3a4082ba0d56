"""Ctrl-C at a safe moment: between two steps, when pages, queues and donated buffers are whole.

`DeferredInterrupt` chooses the moment for a program; `HeldInterrupt` keeps milliseconds of the
host's work in one piece, whoever handles the signal.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

_DEFAULTS = (signal.default_int_handler, signal.SIG_DFL)


class DeferredInterrupt:
    """While open, a first signal is kept until `check`; a second one is raised at once.

    The one after a raised one is kept, too: what unwinds then, removing locks say, is not cut off.
    An interrupt in the middle of a step loses buffers that were donated to it; what ran is then
    computed again. Does nothing outside the main thread, and leaves signals alone that the program
    handles or ignores itself.
    """

    def __init__(
        self,
        *signals: signal.Signals,
        defers: bool = True,
        notice: bytes = b"",
    ) -> None:
        """Installs nothing yet.

        Args:
          signals: that interrupt; none given: SIGINT.
          defers: False: signals are raised at once until `defer` is called.
          notice: written to standard error when the first one came and is kept.
        """
        self._signals = signals or (signal.SIGINT,)
        self._defers = defers
        self._notice = notice
        self._is_pending = False
        self._is_over = False
        self._was_raised = False  # by us, in the middle of something
        self._unwinds = False  # since then, as far as we know
        self._before: dict[signal.Signals, object] = {}

    @property
    def is_pending(self) -> bool:
        """True when a signal is kept."""
        return self._is_pending

    def expose(self) -> None:
        """Signals are raised at once until `defer` is called; one that is kept, now."""
        self._defers = False
        if self._is_pending:
            self._is_pending = False
            self._was_raised = self._unwinds = True
            raise KeyboardInterrupt

    def defer(self) -> None:
        """Signals are kept from now on.

        One that came before and did not end the program counts as kept: Python drops what is raised
        in a finalizer or a garbage collector's callback, and JAX installs such a callback.
        """
        self._defers = True
        self._is_pending = self._is_pending or self._was_raised

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within, an error that follows a raised signal becomes the `KeyboardInterrupt` again.

        Libraries that are cut off in the middle, in taking a lock say, may raise one of their own.
        """
        try:
            yield
        except Exception as error:
            if not self._was_raised:
                raise
            raise KeyboardInterrupt from error

    def check(self) -> None:
        """Raises `KeyboardInterrupt` if a signal came since the last check."""
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

    def finish(self) -> None:
        """What came was answered by other means, and the result of the work is known.

        One more signal changes nothing; another one still ends what takes too long to close.
        """
        self._is_pending = self._was_raised = False
        self._defers = self._is_over = True

    def __enter__(self) -> DeferredInterrupt:
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                before = signal.getsignal(number)
                if before in _DEFAULTS:
                    self._before[number] = before
                    signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type] (it came from getsignal)
        self._before.clear()
        if kind is None and not self._is_over:
            self.check()

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number  # what a signal handler is called with
        is_heard = not _is_in_callback(frame)
        if is_heard and (self._is_pending or not self._defers) and not self._unwinds:
            self._was_raised = self._unwinds = True
            raise KeyboardInterrupt
        is_first = not self._unwinds
        self._is_pending, self._unwinds = True, False
        if self._notice and is_first and not self._is_over:
            # Not through a buffered stream: the signal may have come in the middle of its work. And
            # whoever reads it may have been ended by the same Ctrl-C.
            with suppress(OSError):
                os.write(2, self._notice)


def _is_in_callback(frame: FrameType | None) -> bool:
    """Within JAX's callback of the garbage collector: what is raised there is printed and lost."""
    while frame is not None:
        if frame.f_code.co_name == "_xla_gc_callback":
            return True
        frame = frame.f_back
    return False


class HeldInterrupt:
    """While open, SIGINT waits; at the end its own handler is called, whatever that does.

    For short work that must be done whole. Does nothing outside the main thread, where no signal
    is handled.
    """

    def __init__(self) -> None:
        """Installs nothing yet."""
        self._handler: Any = None  # in whose place ours is
        self._kept: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        self._kept = None
        self._handler = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        handler = self._handler
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
            if self._kept is not None:
                handler(*self._kept)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._kept = number, frame
