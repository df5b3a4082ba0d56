"""The batch program on real small file systems: full, read-only, and one that breaks.

`test_batch_files.py` fails each call in turn; here the kernel does, under a program of its own.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fork_server import ForkServer
from tests.small_disk import KIB, FaultyDisk, MemoryDisk
from tests.tiny_checkpoint import tiny_checkpoint
from tests.tiny_job import Job

NUM_LINES = 60
PAGE = 4 * KIB  # what a tmpfs gives room in; the lock and the manifest have one each
PATIENCE = 300.0  # seconds until a run must have written something
ATTEMPTS = 10  # to break a disk before a run is done


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job whose undisturbed output is known; its runs share what was compiled."""
    server = ForkServer(tmp_path_factory.mktemp("cache"))
    model = tiny_checkpoint(tmp_path_factory.mktemp("model"))
    yield Job(server, tmp_path_factory.mktemp("job"), model, NUM_LINES)
    server.close()


@pytest.fixture
def memory_disk(job: Job, tmp_path: Path) -> Iterator[MemoryDisk]:
    disk = MemoryDisk(tmp_path / "disk", len(job.wanted) + 64 * KIB)
    job.out_folder = disk.folder
    job.renew()
    yield disk
    disk.close()


def contents(job: Job) -> dict[str, str]:
    """Digest of each file on the disk, but for the lock."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in job.out_folder.iterdir()
        if path.suffix != ".lock" and path.is_file()
    }


def assert_stopped_full(job: Job, status: int, shown: str) -> None:
    """It says so, and left whole lines of the right answers."""
    assert status == 75, shown
    assert f"error: cannot write {job.out}: No space left on device" in shown
    assert "run the same command again to continue" in shown
    assert "Traceback" not in shown
    assert not job.out.exists()
    assert job.written() == job.whole_lines(), "every line is whole"
    assert set(job.whole_lines().splitlines()) <= set(job.wanted.splitlines())
    assert ".partial.sorted" not in job.side_files()


def test_a_disk_that_fills_up_while_it_answers(job: Job, memory_disk: MemoryDisk) -> None:
    memory_disk.fill(leave=4 * PAGE)
    status, shown = job.run()
    assert_stopped_full(job, status, shown)
    before = job.whole_lines()
    assert 0 < before.count(b"\n") < NUM_LINES
    status, shown = job.run()  # it is as full as before
    assert_stopped_full(job, status, shown)
    assert job.whole_lines().startswith(before), "a shorter line may have found room"
    before = job.whole_lines()
    memory_disk.remount("size=4m")
    status, shown = job.run()
    assert status == 3, shown
    num_lines = before.count(b"\n")
    assert f"continuing {job.out}: {num_lines} lines are answered" in shown
    job.check()


def test_a_disk_without_room_for_the_ordered_copy(job: Job, memory_disk: MemoryDisk) -> None:
    memory_disk.fill(leave=len(job.wanted) + 3 * PAGE)
    status, shown = job.run()
    assert_stopped_full(job, status, shown)
    assert sorted(job.whole_lines().splitlines()) == sorted(job.wanted.splitlines())
    memory_disk.remount("size=4m")
    status, shown = job.run()
    assert status == 3, shown
    assert "loading" not in shown, "no answer is missing: no model is needed"
    job.check()


@pytest.mark.parametrize("pages", [0, 1, 2])
def test_a_disk_that_is_full_before_the_first_answer(
    pages: int, job: Job, memory_disk: MemoryDisk
) -> None:
    """With room for nothing at all; for the lock; and for the manifest, too."""
    filler = memory_disk.fill(leave=pages * PAGE)
    kept = hashlib.sha256(filler.read_bytes()).hexdigest()
    status, shown = job.run()
    assert status == (75 if pages == 2 else 2), shown
    assert "No space left on device" in shown
    assert "Traceback" not in shown
    assert not job.out.exists()
    assert job.written() == b""
    assert contents(job)["filler"] == kept
    memory_disk.remount("size=4m")
    job.finish()


def test_a_disk_that_cannot_be_written_starts_nothing(job: Job, memory_disk: MemoryDisk) -> None:
    (job.out_folder / "precious").write_text("somebody's\n")
    before = contents(job)
    memory_disk.remount("ro")
    for more in ([], ["--overwrite"]):
        status, shown = job.run(more)
        assert status == 2, shown
        assert f"error: cannot write the output {job.out}: Read-only file system" in shown
        assert "loading" not in shown
        assert contents(job) == before
    memory_disk.remount("rw,size=4m")
    job.finish()


def test_a_disk_that_was_locked_between_two_runs(job: Job, memory_disk: MemoryDisk) -> None:
    """What a full disk left is not touched, and continued when the disk may be written."""
    memory_disk.fill(leave=4 * PAGE)
    status, shown = job.run()
    assert_stopped_full(job, status, shown)
    before = contents(job)
    memory_disk.remount("ro")
    status, shown = job.run()
    assert status == 2, shown
    assert "Read-only file system" in shown
    assert contents(job) == before
    memory_disk.remount("rw,size=4m")
    job.finish()


def test_a_disk_that_breaks_while_it_answers(job: Job, tmp_path: Path) -> None:
    """The kernel makes it read-only under the program; what was synced is there afterwards."""
    disk = FaultyDisk(tmp_path / "disk", tmp_path / "image", 4096 * KIB)
    try:
        job.out_folder = disk.folder
        status = break_while_it_answers(job, disk)
        shown = job.log.read_text()
        assert status == 75, shown
        assert f"error: cannot write {job.out}: " in shown
        assert "Traceback" not in shown
        assert not job.out.exists()
        disk.mend()
        assert set(job.whole_lines().splitlines()) <= set(job.wanted.splitlines())
        job.finish()
    finally:
        disk.close()


def break_while_it_answers(job: Job, disk: FaultyDisk) -> int:
    """Returns the exit status of a run whose disk failed before the output was there.

    A fast machine may be done before: each such run is checked, and another one started.
    """
    for _ in range(ATTEMPTS):
        job.renew()
        child = job.start()
        job.wait_for_answers(3, time.monotonic() + PATIENCE)
        os.kill(child, signal.SIGSTOP)  # it must not hurry on while the disk is broken
        disk.fail()
        was_done = job.out.exists()
        os.kill(child, signal.SIGCONT)
        status = job.server.wait()
        if not was_done:
            return status
        disk.mend()
        job.finish()
    pytest.fail(f"each of {ATTEMPTS} runs was done before its disk failed")
