"""The batch program, ended at random moments with a real model: nothing is lost or repeated.

`test_batch_files.py` dies at every call that changes a file, in turn; here the whole program runs
in processes of its own that get signals, while it starts, computes, writes or ends.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.fork_server import ForkServer
from tests.tiny_checkpoint import tiny_checkpoint
from tests.tiny_job import Job

STARTING = 3.0  # seconds that a start takes at most on a busy machine, roughly
SECOND = 0.05  # seconds that a second signal comes later, at most
# Lines that one step may still end: those that run, and bad ones that were read beside them.
LAST_STEP = 32

type Signals = tuple[signal.Signals, ...]

KILL: Signals = (signal.SIGKILL,)
TERM: Signals = (signal.SIGTERM,)
INT: Signals = (signal.SIGINT,)
MIX: tuple[Signals, ...] = (KILL, TERM, INT, INT * 2, INT + TERM, TERM * 3)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    made = ForkServer(tmp_path_factory.mktemp("cache"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def kill_at_random(job: Job, numbers: Signals, answers_per_run: int) -> int:
    """One run that signals end, if it does not end before; returns its exit status."""
    before, said = job.whole_lines(), job.log.stat().st_size if job.log.exists() else 0
    was_locked = ".lock" in job.side_files()  # by a run that was killed
    pid = job.start()
    if job.rng.random() < 0.2:
        time.sleep(job.rng.uniform(0.0, STARTING))
    else:
        job.wait_for_answers(job.rng.randint(0, answers_per_run), time.monotonic() + 60)
        time.sleep(job.rng.uniform(0.0, 0.005))
    missing = job.count
    for at, number in enumerate(numbers):
        time.sleep(job.rng.uniform(0.0, SECOND) if at else 0.0)
        os.kill(pid, number)  # nothing happens to one that has ended
        if not at:  # counted when it is sent: a busy machine may let time pass before
            missing -= job.num_answers()
    status = job.server.wait()
    if not job.out.exists():
        assert job.whole_lines().startswith(before), "an answer that was there is gone"
    if numbers != KILL:
        # Without a log: it ended before it was the program.
        shown = job.log.read_text()[said:] if job.log.exists() else ""
        check_stopped(job, numbers, status, missing, shown)
        if status == 75:
            check_unlocked(job, numbers, was_locked and "before the first line" in shown)
        if status < 0 and len(numbers) == 1 and not job.out.exists():  # it had not begun
            assert job.written() == before
            assert not shown or numbers == INT, shown
    return status


def check_stopped(job: Job, numbers: Signals, status: int, missing: int, shown: str) -> None:
    """What signals that can be caught leave behind."""
    told = "run the same command again to continue" in shown or "the same command starts" in shown
    assert status in (3, 75, *(-number for number in numbers)), (status, shown)
    assert told == (status == 75) or len(numbers) > 1, shown
    # Python's own, of Ctrl-C before the program began; another signal may be what ended it then.
    assert "Traceback" not in shown or (signal.SIGINT in numbers and status < 0), shown
    if status == 3:
        assert missing <= LAST_STEP, f"a signal was lost while {missing} lines were open: {shown}"
    if status == 75:
        assert job.written() == job.whole_lines(), "every line is whole"


def check_unlocked(job: Job, numbers: Signals, came_before_the_lock: bool) -> None:
    """No lock file stays, but where the run never had it."""
    # Of three signals the last one may cut off even what the first one ended.
    assert ".lock" not in job.side_files() or came_before_the_lock or len(numbers) > 2


def kill_many(job: Job, kills: int, answers_per_run: int, ways: Sequence[Signals]) -> None:
    done = 0
    while done < kills:
        numbers = job.rng.choice(ways)
        status = kill_at_random(job, numbers, answers_per_run)
        if numbers == KILL:
            assert status in (3, -signal.SIGKILL), job.log.read_text()
        done += status != 3
        if status == 3:
            job.check()
            job.renew()
    job.finish()


def test_twelve_kills_over_a_hundred_lines(server: ForkServer, model: Path, tmp_path: Path) -> None:
    kill_many(Job(server, tmp_path, model, 100), kills=12, answers_per_run=20, ways=[KILL])


def test_eight_terms_over_a_hundred_lines(server: ForkServer, model: Path, tmp_path: Path) -> None:
    kill_many(Job(server, tmp_path, model, 100), kills=8, answers_per_run=20, ways=[TERM])


@pytest.mark.slow
@pytest.mark.parametrize("ways", [[KILL], [TERM], MIX], ids=["kill", "term", "mix"])
def test_two_hundred_kills_over_a_thousand_lines(
    ways: Sequence[Signals], server: ForkServer, model: Path, tmp_path: Path
) -> None:
    kill_many(Job(server, tmp_path, model, 1000), kills=200, answers_per_run=12, ways=ways)


def test_sigterm_finishes_the_step_and_says_how_to_go_on(
    server: ForkServer, model: Path, tmp_path: Path
) -> None:
    job = Job(server, tmp_path, model, 60)
    for _ in range(3):
        pid = job.start()
        job.wait_for_answers(8, time.monotonic() + 60)
        os.kill(pid, signal.SIGTERM)
        status = server.wait()
        if status == 3:  # it was at its end
            break
        assert status == 75, job.log.read_text()
        data = job.partial.read_bytes()
        assert data.endswith(b"}\n"), "every line is whole"
        shown = job.log.read_text().splitlines()
        assert shown[-1] == (
            f"serve_batch: interrupted. The answers so far are in {job.partial}; "
            "run the same command again to continue."
        )
        assert not job.out.exists()
        assert not job.out.with_name(job.out.name + ".lock").exists()
    job.finish()
