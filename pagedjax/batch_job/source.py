"""The input: requests from a file or a pipe, plain or packed by gzip, read as often as needed.

Owns where the bytes are and what they amount to. What comes through a pipe is kept in a file beside
the output, because a job that is continued reads it again.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from pagedjax.batch_job import files
from pagedjax.batch_job.errors import CannotStart, UnreadableInput
from pagedjax.batch_job.lines import read_lines

STDIN = "-"
_CHUNK = 2**20
_GZIP_MAGIC = b"\x1f\x8b"


class Source:
    """The lines of an input."""

    def __init__(self, name: str, raw: BinaryIO, path: Path | None = None) -> None:
        """Takes an open file.

        Args:
          name: for messages.
          path: where others can open it once the job has begun; None: nowhere.
        """
        self.name = name
        self.path = path
        self._raw = raw
        self._stat = os.fstat(raw.fileno())
        buffered = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(cast(Any, raw))
        packed = buffered.peek(2)[:2] == _GZIP_MAGIC
        self._file: BinaryIO = cast(BinaryIO, gzip.GzipFile(fileobj=buffered)) if packed else raw

    @property
    def is_regular(self) -> bool:
        """True where it can be read twice."""
        return stat.S_ISREG(self._stat.st_mode)

    @property
    def has_changed(self) -> bool:
        """True when the file was written since it was opened."""
        return _stamp(os.fstat(self._raw.fileno())) != self.stamp

    @property
    def stamp(self) -> tuple[int, int]:
        """What differs when the file was written: its size and time when it was opened."""
        return _stamp(self._stat)

    def measure(self) -> dict[str, Any]:
        """`sha256`, `bytes` and `lines` of all that it holds; raises `CannotStart`."""
        digest, num_bytes, num_lines, last = hashlib.sha256(), 0, 0, b"\n"
        self._file.seek(0)
        for chunk in self.chunks():
            digest.update(chunk)
            num_bytes += len(chunk)
            num_lines += chunk.count(b"\n")
            last = chunk[-1:]
        return {
            "sha256": digest.hexdigest(),
            "bytes": num_bytes,
            "lines": num_lines + (last != b"\n"),
        }

    def lines(self) -> Iterator[bytes]:
        """The lines, from the first one where that is possible; raises `UnreadableInput`."""
        if self.is_regular:
            self._file.seek(0)
        try:
            yield from read_lines(self._file)
        except (EOFError, zlib.error, OSError) as error:
            raise UnreadableInput(self._unreadable(error)) from error

    def chunks(self) -> Iterator[bytes]:
        """The bytes from here on, unpacked; raises `CannotStart`."""
        try:
            while chunk := self._file.read(_CHUNK):
                yield chunk
        except (EOFError, zlib.error, OSError) as error:
            raise CannotStart(self._unreadable(error)) from error

    def _unreadable(self, error: Exception) -> str:
        what = error.strerror if isinstance(error, OSError) else None
        return f"cannot read the input {self.name}: {what or error}"


def _stamp(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns


def open_source(path: str, stack: ExitStack) -> Source:
    """Opens a file or, for "-", standard input; raises `CannotStart`."""
    if path == STDIN:
        if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison] (Python does that)
            raise CannotStart("standard input is closed: give a file of requests.")
        return Source("standard input", sys.stdin.buffer)
    if path.lower().startswith(("http://", "https://")):
        raise CannotStart(f"the input must be a local file. Got the address {path}.")
    try:
        if os.path.isdir(path):
            raise CannotStart(f"the input {path} must be a file of JSON lines. Got a directory.")
        return Source(path, stack.enter_context(Path(path).open("rb")), Path(path))
    except OSError as error:
        raise CannotStart(f"cannot read the input {path}: {error.strerror}") from error


def spool(source: Source, path: Path, kept: Path, stack: ExitStack) -> Source:
    """Copies a pipe into a file and opens that; an empty pipe means what came through before.

    Args:
      path: of the copy, which is removed at the end unless it was renamed.
      kept: of an earlier run; the copy's name when a job begins.
    """
    stack.callback(_discard, path)
    try:
        with path.open("wb") as file:
            for chunk in source.chunks():
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            is_empty = file.tell() == 0
        chosen = kept if is_empty and kept.exists() else path
        return Source(source.name, stack.enter_context(chosen.open("rb")), kept)
    except OSError as error:
        raise CannotStart(f"cannot keep the input in {path}: {error.strerror}") from error


def _discard(path: Path) -> None:
    """Removes a file that only lies in the way, at a moment when the job's result is known."""
    with suppress(OSError):
        files.remove(path)
