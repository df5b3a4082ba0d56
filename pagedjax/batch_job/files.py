"""Files that survive a kill at any moment: what is on the disk after each call, and after none.

Owns appending whole lines, replacing a file at once, and locks. A file is either its old self or
its new self; only the end of a file that is appended to may be torn. Knows nothing of what the
files hold.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# What flock says where the file system has none.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class Locked(Exception):
    """Another process holds the lock; the text says which."""


def append(descriptor: int, data: bytes) -> None:
    """Writes all of it at the end of a file."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def replace(source: Path, target: Path) -> None:
    """Renames a file that was synced; afterwards `target` is it, whatever happens."""
    os.replace(source, target)
    sync_folder(target.parent)


def write_whole(path: Path, data: bytes) -> None:
    """Makes `path` hold exactly this: all of it or, when interrupted, what it held before."""
    fresh = path.with_name(path.name + ".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        append(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    replace(fresh, path)


def remove(path: Path) -> None:
    """Removes a file, if it is there; afterwards it stays away."""
    with suppress(FileNotFoundError):
        os.unlink(path)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes names in a folder durable, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems sync no folders
            raise
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Holds a lock file, which is gone afterwards; a dead process holds none.

    Yields:
      False where the file system has no locks, so that nothing keeps two runs apart.

    Raises:
      Locked: another process has it.
    """
    descriptor = None
    # A signal that came while it is taken would leave the file behind.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        try:
            descriptor = _lock(path)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield descriptor is not None
    finally:
        if descriptor is not None:
            with suppress(OSError):
                os.unlink(path)  # while it is held: whoever comes now makes a new one
            os.close(descriptor)


def _lock(path: Path) -> int | None:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, descriptor):
                os.ftruncate(descriptor, 0)
                append(descriptor, f"{os.getpid()}\n".encode())
                return descriptor
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise Locked(f"process {holder}" if holder else "another process") from None
        except OSError as error:
            os.close(descriptor)
            if error.errno in _NO_LOCKS:
                return None
            raise
        os.close(descriptor)  # its holder removed the file between our two calls


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
