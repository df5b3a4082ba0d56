"""The `os` module with a fault: a process that dies, or a disk that fails, at a chosen call.

Stands in for `os` in the modules of the batch program that write files. Calls that change files
are counted; the chosen one, if it writes, writes half. Afterwards a dead process changes nothing.
Syncing is counted and left out: a process that dies takes nothing with it that was written.
"""

from __future__ import annotations

import os
from typing import Any

CHANGING = ("write", "fsync", "replace", "unlink", "ftruncate")


class Killed(BaseException):
    """What stands for the end of the process."""


class FaultyOs:
    """Counts changing calls, and fails at call number `at` (from 0); None: never."""

    def __init__(self, at: int | None = None, error: BaseException | None = None) -> None:
        """An `error` is raised that once; without one the process dies there."""
        self.calls: list[str] = []
        self._at, self._error = at, error
        self._is_dead = False
        self._open: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        if name not in CHANGING:
            return getattr(os, name)
        return lambda *arguments: self._change(name, *arguments)

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        if self._is_dead:
            raise Killed
        descriptor = os.open(path, flags, mode)
        self._open.add(descriptor)
        return descriptor

    def close(self, descriptor: int) -> None:
        if not self._is_dead:
            self._open.discard(descriptor)
            os.close(descriptor)

    def bury(self) -> None:
        """Closes what the dead process had open, as the kernel does; so its locks end."""
        for descriptor in self._open:
            os.close(descriptor)
        self._open.clear()

    def _change(self, name: str, *arguments: Any) -> Any:
        if self._is_dead:
            raise Killed
        self.calls.append(name)
        if self._at is not None and len(self.calls) == self._at + 1:
            if name == "write":
                os.write(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
            if self._error is not None:
                raise self._error
            self._is_dead = True
            raise Killed
        return None if name == "fsync" else getattr(os, name)(*arguments)
