"""The journal: answers in a file, line by line, that a later run reads and continues.

Owns `OUTPUT.partial`: what of it counts after a kill, when it is synced, and how it becomes the
output. Each of its lines is an answer as the output has it, and is written by one append.

    put -> append -> fsync (in groups) -> publish: one rename
    recover: the longest run of whole, readable, different lines from the start; the rest is cut
"""

from __future__ import annotations

import json
import os
import re
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagedjax.batch_job import files
from pagedjax.batch_job.entry import count_answer
from pagedjax.batch_job.errors import InputChanged
from pagedjax.errors import IntegrityError

SYNC_LINES, SYNC_SECONDS = 256, 2.0  # as much may be computed again after a power failure
_COPY_BYTES = 2**20

_START = re.compile(rb'\{"id": "batch_req_([0-9a-f]{32})", ')
_ABSENT, _EXPECTED = -1, -2  # of a line's place: not asked for; no answer yet


@dataclass(slots=True)
class Recovered:
    """What earlier runs left."""

    places: dict[bytes, int] = field(default_factory=dict[bytes, int])  # key -> offset of its line
    num_bytes: int = 0  # that count
    num_cut: int = 0  # bytes behind them that do not
    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


def recover(path: Path) -> Recovered:
    """Reads a journal, or the output that it became, as far as it is whole."""
    found = Recovered()
    with path.open("rb") as file:
        for line in file:
            entry = _entry(line)
            if entry is None or entry[0] in found.places:
                break
            key, document = entry
            found.places[key] = found.num_bytes
            found.num_bytes += len(line)
            count_answer(found, document)
        found.num_cut = os.fstat(file.fileno()).st_size - found.num_bytes
    return found


class Journal:
    """Answers on their way into a file; see `pagedjax.batch_job.answers.Answers`."""

    is_full = False  # nothing waits here

    def __init__(self, path: Path, num_lines: int, recovered: Recovered) -> None:
        """Opens the journal, or makes it, and cuts off what does not count.

        Args:
          num_lines: of the input, blank ones too.
          recovered: what `recover` found in it.
        """
        self._path = path
        self._old = recovered.places  # answered, and not met again in the input
        self._places = array("q", [_ABSENT]) * (num_lines + 1)  # line number -> offset of its line
        self._size = recovered.num_bytes
        self._is_broken = False
        self._num_unsynced, self._synced_at = 0, time.monotonic()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        os.ftruncate(self._file, self._size)
        os.fsync(self._file)
        files.sync_folder(path.parent)

    def expect(self, number: int, key: str) -> bool:
        """Notes a line of the input; False: its answer is here. Raises `InputChanged`."""
        if number >= len(self._places):
            raise InputChanged
        if self._places[number] >= 0:
            return False
        place = self._old.pop(bytes.fromhex(key), _EXPECTED)
        self._places[number] = place
        return place == _EXPECTED

    def put(self, number: int, text: str) -> None:
        """Appends an answer. What was written of one that fails is taken back."""
        if self._is_broken:
            return  # an earlier answer may be torn: nothing may follow it
        data = text.encode("utf-8")
        try:
            files.append(self._file, data)
        except BaseException:
            self._break()
            raise
        self._places[number] = self._size
        self._size += len(data)
        self._num_unsynced += 1
        if self._num_unsynced >= SYNC_LINES:
            self._sync()

    def tick(self) -> None:
        """Syncs when the last time is long ago."""
        if self._num_unsynced and time.monotonic() - self._synced_at >= SYNC_SECONDS:
            self._sync()

    def close(self) -> None:
        """Syncs what was written."""
        if not self._is_broken:
            self._sync()

    def release(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def publish(self, output: Path, *, ordered: bool) -> None:
        """Makes `output` hold all answers, at once, and the journal go.

        Args:
          ordered: in the order of the input, and not as they came.

        Raises:
          IntegrityError: an answer is missing, or one is too many.
        """
        numbers = [number for number, place in enumerate(self._places) if place != _ABSENT]
        if self._old or any(self._places[number] == _EXPECTED for number in numbers):
            raise IntegrityError(
                f"{self._path} must hold one answer for each line of the input and no other. Got "
                f"{len(self._old)} others: it was changed by hand. Remove it and run again."
            )
        self._sync()
        if not ordered:
            files.replace(self._path, output)
            return
        sorted_path = self._path.with_name(self._path.name + ".sorted")
        try:
            self._copy(numbers, sorted_path)
        except BaseException:
            files.remove(sorted_path)  # it may be what filled the disk
            raise
        files.replace(sorted_path, output)
        files.remove(self._path)

    def _copy(self, numbers: list[int], target: Path) -> None:
        """Copies the answers of these lines in this order."""
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            with self._path.open("rb") as file:
                chunk = bytearray()
                for number in numbers:
                    file.seek(self._places[number])
                    chunk += file.readline()
                    if len(chunk) >= _COPY_BYTES:
                        files.append(descriptor, bytes(chunk))
                        chunk.clear()
                files.append(descriptor, bytes(chunk))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _sync(self) -> None:
        try:
            os.fsync(self._file)
        except OSError:
            self._is_broken = True  # what of it is on the disk is found out by `recover`
            raise
        self._num_unsynced, self._synced_at = 0, time.monotonic()

    def _break(self) -> None:
        """Leaves whole lines only, as far as that can be done."""
        self._is_broken = True
        try:
            os.ftruncate(self._file, self._size)
            os.fsync(self._file)
        except OSError:
            pass  # `recover` will cut


def _entry(line: bytes) -> tuple[bytes, dict[str, Any]] | None:
    """Key and content of a line; None where it is torn or was never ours."""
    start = _START.match(line)
    if start is None or not line.endswith(b"}\n"):
        return None
    try:
        document = json.loads(line)
        document["response"]["body"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return bytes.fromhex(start[1].decode("ascii")), document
