"""Small file systems of their own, that tests fill, lock against writing, and break.

A shell in a mount namespace of its own mounts them, so that they end with it, whatever happens,
and nobody else sees them; files are reached through /proc/PID/root. Needs the right to mount:
root's, or that of a user namespace.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

KIB = 1024


class SmallDisk:
    """One mounted file system; `folder` is its root."""

    def __init__(self, mount_point: Path) -> None:
        """Starts the shell; skips the test where mounting is not permitted."""
        mount_point.mkdir()
        self._mount_point = mount_point
        if shutil.which("unshare") is None or shutil.which("mount") is None:
            pytest.skip("needs the programs unshare and mount")
        user = [] if os.geteuid() == 0 else ["--map-root-user"]
        self._shell = subprocess.Popen(
            ["unshare", "--mount", *user, "sh"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.folder = Path(f"/proc/{self._shell.pid}/root{mount_point}")
        self.need("true")  # root without the right to mount has no shell

    def close(self) -> None:
        """Ends the shell, and with it the file system."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        with suppress(BrokenPipeError):  # where it never started
            self._shell.stdin.close()
        self._shell.wait(60)
        self._shell.stdout.close()

    def fill(self, leave: int) -> Path:
        """Makes a file that leaves so many bytes; returns it."""
        filler = self.folder / "filler"
        free = os.statvfs(self.folder).f_bavail * os.statvfs(self.folder).f_frsize
        filler.write_bytes(bytes(max(free - leave, 0)))
        return filler

    def do(self, command: str) -> None:
        """Runs a command in the shell; a failure fails the test."""
        status, said = self._ask(command)
        assert status == 0, f"{command}: {said}"

    def need(self, command: str) -> None:
        """Runs a command in the shell; a failure skips the test."""
        status, said = self._ask(command)
        if status:
            self.close()
            pytest.skip(f"may not mount here: {said.strip()}")

    def _ask(self, command: str) -> tuple[int, str]:
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        end = "the command ended with "
        said = ""
        with suppress(BrokenPipeError):  # `unshare` was refused: what it said is read below
            self._shell.stdin.write(
                f"{{ {command}; }} </dev/null 2>&1; printf '\\n%s%s\\n' '{end}' $?\n"
            )
            self._shell.stdin.flush()
        for line in self._shell.stdout:
            if line.startswith(end):
                return int(line[len(end) :]), said
            said += line
        return 1, said


class MemoryDisk(SmallDisk):
    """A tmpfs: its size and whether it may be written can change at any time."""

    def __init__(self, mount_point: Path, size: int) -> None:
        """Makes one of `size` bytes."""
        super().__init__(mount_point)
        self.need(f"mount -t tmpfs -o size={size} none '{mount_point}'")

    def remount(self, options: str) -> None:
        """Changes it, e.g. "size=1m" or "ro"."""
        # Without the source, `mount` adds the options that it finds in the list of mounts: the
        # owner is among them, as a number that a user namespace does not know.
        self.do(f"mount -o remount,{options} none '{self._mount_point}'")


class FaultyDisk(SmallDisk):
    """An ext4 in a file, which `fail` makes read-only under whoever writes to it."""

    def __init__(self, mount_point: Path, image: Path, size: int) -> None:
        """Makes one of `size` bytes; skips the test where the kernel offers no error to cause."""
        if shutil.which("mkfs.ext4") is None or shutil.which("e2fsck") is None:
            pytest.skip("needs the programs mkfs.ext4 and e2fsck")
        super().__init__(mount_point)
        with image.open("wb") as file:
            file.truncate(size)
        self._image = image
        self.need(f"mkfs.ext4 -q -b 1024 '{image}'")
        self.need(f"mount -o loop,errors=remount-ro '{image}' '{mount_point}'")
        trigger = self._trigger()
        if not os.access(trigger, os.W_OK):  # /sys may be read-only, or not be there
            self.close()
            pytest.skip(f"may not write {trigger}")

    def fail(self) -> None:
        """An error of the file system, as a broken disk makes it: nothing is written any more."""
        self._trigger().write_text("1")

    def mend(self) -> None:
        """What an administrator does then."""
        self.do(f"umount '{self._mount_point}'")
        # 1: errors were mended.
        self.do(f"{{ e2fsck -fy '{self._image}' || test $? -eq 1; }}")
        self.do(f"mount -o loop,errors=remount-ro '{self._image}' '{self._mount_point}'")

    def _trigger(self) -> Path:
        """The kernel's file that causes an error; each mount may be on another loop device."""
        device = self.folder.stat().st_dev
        block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
        return Path("/sys/fs/ext4") / block.name / "trigger_fs_error"
