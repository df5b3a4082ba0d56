"""Where answer lines go: to a stream as they come, or to a stream in the order of the input.

Owns order and what waits for it. The journal, which keeps answers in a file that a later run
continues, is a third kind (`journal.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

MAX_WAITING_CHARS = 64 * 2**20  # of answers that wait for an earlier line's


class Answers(Protocol):
    """What a job does with answers. Whatever `put` raises is about the output, not the line."""

    @property
    def is_full(self) -> bool:
        """True while no further line should be begun."""
        ...

    def expect(self, number: int, key: str) -> bool:
        """A line with this number and key comes; False: it was answered in an earlier run."""
        ...

    def put(self, number: int, text: str) -> None:
        """Takes the answer of an expected line, one whole line of text."""
        ...

    def tick(self) -> None:
        """Called after every step."""
        ...

    def close(self) -> None:
        """No answer comes any more; those that are here are written."""
        ...


class AsFinished:
    """Lines go out as they come."""

    is_full = False

    def __init__(self, write: Callable[[str], None]) -> None:
        """Takes what writes one whole line."""
        self._write = write

    def expect(self, number: int, key: str) -> bool:
        """Nothing was answered before."""
        del number, key  # every line is new
        return True

    def put(self, number: int, text: str) -> None:
        """Writes it."""
        del number  # order does not matter
        self._write(text)

    def tick(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing waits."""


class InputOrder:
    """Lines wait until all earlier ones are written."""

    def __init__(self, write: Callable[[str], None]) -> None:
        """Takes what writes one whole line."""
        self._num_chars = 0  # of the lines that wait
        self._write = write
        self._order: deque[int] = deque()  # numbers of the lines not written yet
        self._ready: dict[int, str] = {}  # those of them that are there

    @property
    def is_full(self) -> bool:
        """True while as much waits as may."""
        return self._num_chars >= MAX_WAITING_CHARS

    def expect(self, number: int, key: str) -> bool:
        """A line of this number will come, after those that are expected already."""
        del key  # nothing was answered before
        self._order.append(number)
        return True

    def put(self, number: int, text: str) -> None:
        """Takes a line, and writes all lines whose turn has come."""
        self._ready[number] = text
        self._num_chars += len(text)
        self._write_ready()

    def tick(self) -> None:
        """Nothing waits for time to pass."""

    def close(self) -> None:
        """Writes the lines that are there, in order; the others will not come."""
        self._order = deque(number for number in self._order if number in self._ready)
        self._write_ready()

    def _write_ready(self) -> None:
        while self._order and self._order[0] in self._ready:
            text = self._ready.pop(self._order.popleft())
            self._num_chars -= len(text)
            try:
                self._write(text)
            except BaseException:
                self._order.clear()  # this line may be torn: nothing may follow it
                raise
