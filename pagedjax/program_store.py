"""The program store: compiled programs as files, kept from one start to the next. Only bytes here.

Owns the folder: who may write it, what an entry looks like, that a reader never sees half of one,
and how large it grows. Knows nothing of what the bytes mean, nor how a key is made.

**Trust.** Whoever writes an entry decides what the reader's processor runs, so a folder or a file
that another user owns or may write is not used. **Damage.** An entry whose checksum is wrong is no
entry, and neither is one under another entry's name: the key is in it. **At once.** A writer makes
a file of its own and renames it: of two, the last one stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger("pagedjax")

MAX_BYTES = 2 * 2**30  # of all entries; a model of 30 layers has 10 MiB for one set of options
_MAGIC = b"pagedjax program 2\n"
_SUFFIX, _UNFINISHED = ".program", ".tmp"
_ABANDONED = 3600.0  # seconds, after which a file is not being written any more
_MAX_HEADER = 4096
_FAST = 1  # zlib's level: a sixth of the size, and hardly any time
_WRITERS = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class Entry:
    """One program as it is kept.

    Attributes:
      name: for people.
      seconds: that compiling it took.
      payload: the program.
    """

    name: str
    seconds: float
    payload: bytes


class ProgramStore:
    """Entries by key, each a file of one folder."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        """Takes a folder that `open_folder` has checked."""
        self._folder = folder
        self._max_bytes = max_bytes

    def read(self, key: str) -> Entry | None:
        """The entry of a key, unless there is none, or it is damaged or another user's."""
        path = self._path(key)
        try:
            # A pipe of that name must not be waited for.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            return self._refuse(path, error)
        try:
            found = os.fstat(descriptor)
            _check_owner(found, path)
            if not stat.S_ISREG(found.st_mode):
                raise ValueError("it is no file")
            with open(descriptor, "rb", closefd=False) as file:
                entry = _decode(file.read(), key)
        except (OSError, ValueError) as error:
            return self._refuse(path, error)
        finally:
            os.close(descriptor)
        with contextlib.suppress(OSError):  # another process may have removed it
            os.utime(path)  # the least recently used go first
        return entry

    def write(self, key: str, entry: Entry) -> None:
        """Keeps an entry; one that cannot be written is a warning, for nothing depends on it."""
        path = self._path(key)
        try:
            descriptor, name = tempfile.mkstemp(_UNFINISHED, path.stem[:16], self._folder)
            try:
                with open(descriptor, "wb") as file:
                    file.write(_encode(entry, key))
                os.replace(name, path)
            except BaseException:
                os.unlink(name)
                raise
            self._evict(path)
        except OSError as error:
            logger.warning("not keeping a compiled program: %s", error)

    def remove(self, key: str) -> None:
        """Forgets an entry that turned out to be of no use."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{_SUFFIX}"

    def _refuse(self, path: Path, error: Exception) -> None:
        logger.warning("compiling anew, for %s cannot be used: %s", path, error)

    def _evict(self, newest: Path) -> None:
        """Removes what was not used for longest until the rest is small enough, and remains."""
        files: list[tuple[float, int, Path]] = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                found = path.stat()
                files.append((found.st_mtime, found.st_size, path))
        for path in self._folder.glob(f"*{_UNFINISHED}"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < time.time() - _ABANDONED:
                    path.unlink()
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self._max_bytes:
                return
            if path != newest:
                with contextlib.suppress(OSError):
                    path.unlink()
                total -= size


def open_folder(folder: Path) -> Path | None:
    """Makes the folder if need be; None, with a warning, unless only this user may write it."""
    try:
        folder = folder.expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(folder.stat(), folder)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} cannot be written")
    except OSError as error:
        logger.warning("not keeping compiled programs: %s", error)
        return None
    except RuntimeError:  # of `~somebody`; or no HOME, and a user unknown here, as in containers
        why = "no home directory for %s is known; set PAGEDJAX_CACHE_DIR to a folder"
        logger.warning(f"not keeping compiled programs: {why}", folder)
        return None
    return folder


def _check_owner(found: os.stat_result, path: Path) -> None:
    if found.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    if found.st_mode & _WRITERS:
        raise PermissionError(
            f"others may write {path}, and so decide what this process runs; `chmod go-w` it"
        )


def _encode(entry: Entry, key: str) -> bytes:
    body = zlib.compress(entry.payload, _FAST)
    header = {
        "key": key,
        "name": entry.name,
        "seconds": round(entry.seconds, 3),
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    return b"".join([_MAGIC, json.dumps(header).encode(), b"\n", body])


def _decode(data: bytes, key: str) -> Entry:
    """Raises ValueError."""
    start = len(_MAGIC)
    end = data.find(b"\n", start, start + _MAX_HEADER)
    if not data.startswith(_MAGIC) or end < 0:
        raise ValueError("it is no program of pagedjax")
    body = memoryview(data)[end + 1 :]
    try:
        header: Any = json.loads(data[start:end])
        if header["key"] != key:
            raise ValueError("it is another program, under this one's name")
        is_whole = header["sha256"] == hashlib.sha256(body).hexdigest()
        entry = Entry(str(header["name"]), float(header["seconds"]), b"")
        if is_whole:
            return Entry(entry.name, entry.seconds, zlib.decompress(body))
    except (KeyError, TypeError, OverflowError, RecursionError, zlib.error) as error:
        raise ValueError(f"it is damaged ({error!r})") from error
    raise ValueError("its checksum is wrong: it is damaged")
