"""Runs workers and asks them: one process group an engine, asleep (SIGSTOP) unless it is its turn.

A stopped process spins no thread and polls nothing, whatever its libraries would like: that, and no
setting of theirs, is what keeps engines from disturbing each other. POSIX; peaks of memory, and who
belongs to a group, are read from Linux' /proc.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_SHOWN_LINES = 5  # of what a worker printed before it failed


class PeerFailed(Exception):
    """An engine could not do what it was asked; the message says which and why."""


class PeerProcess:
    """A worker: `ask` wakes it and lets it sleep again.

    Args:
      name: of the engine, for messages.
      command: what starts it; it speaks `worker`'s protocol.
      environment: added to this process' own.
      cores: ids of the cores that it may use; None: as this process.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        cores: Sequence[int] | None = None,
    ) -> None:
        self.name = name
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._printed,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # a group of its own, children of its own included
            )
        except OSError:
            self._printed.close()
            raise
        self._unread = b""
        if cores is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(self._process.pid, cores)  # before it starts threads
        self._signal(signal.SIGSTOP)

    def ask(self, message: Mapping[str, Any], timeout: float) -> Any:
        """Wakes the worker, asks, waits for the answer, puts it to sleep.

        Args:
          timeout: seconds.

        Raises:
          PeerFailed: it said why it cannot, it ended, or the time is over. After the last two it is
            dead.
        """
        if self._process.stdin is None or self._process.poll() is not None:
            raise self._ended()
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
            answer = json.loads(self._line(timeout))
        except OSError:  # a broken pipe: it ended before it read
            raise self._ended() from None
        except ValueError as error:
            self.close()
            raise PeerFailed(f"{self.name}: its answer is no JSON: {error}") from error
        finally:
            self._signal(signal.SIGSTOP)
        if "error" in answer:
            raise PeerFailed(f"{self.name}: {answer['error']}")
        return answer["ok"]

    def peak_rss_mib(self) -> float | None:
        """The most memory that its processes ever held, summed; None where /proc does not tell."""
        peaks = [_status_kib(pid, "VmHWM") for pid in self.pids()]
        return sum(peaks) / 1024 if any(peaks) else None

    def pids(self) -> list[int]:
        """Of its group; empty when it has ended, or where there is no /proc."""
        return [pid for pid in map(int, _numbers_in_proc()) if _group(pid) == self._process.pid]

    def close(self) -> None:
        """Ends the whole group."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._printed):
            with contextlib.suppress(OSError):  # unsent words to somebody who is gone
                if pipe is not None:
                    pipe.close()

    def _line(self, timeout: float) -> bytes:
        assert self._process.stdout is not None
        stdout = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout
        while b"\n" not in self._unread:
            ready, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                printed = self._last_printed()
                self.close()
                raise PeerFailed(f"{self.name}: no answer within {timeout:g} s{printed}")
            read = os.read(stdout, 1 << 20)
            if not read:
                raise self._ended()
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _ended(self) -> PeerFailed:
        if self._printed.closed:
            return PeerFailed(f"{self.name}: it has ended")
        status, printed = self._process.wait(), self._last_printed()
        self.close()
        return PeerFailed(f"{self.name}: it ended with status {status}{printed}")

    def _last_printed(self) -> str:
        self._printed.seek(0)
        lines = self._printed.read().decode("utf-8", "replace").strip().splitlines()
        return "; it printed: " + " | ".join(lines[-_SHOWN_LINES:]) if lines else ""

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group has ended
            os.killpg(self._process.pid, number)


def _numbers_in_proc() -> list[str]:
    proc = Path("/proc")
    return [entry.name for entry in proc.iterdir() if entry.name.isdigit()] if proc.is_dir() else []


def _group(pid: int) -> int | None:
    with contextlib.suppress(OSError, IndexError):
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
        return int(after_name.split()[2])  # state, parent, group
    return None


def _status_kib(pid: int, key: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1])
    return 0
