"""The batch program, killed at random moments with a real model: nothing is lost or repeated.

`test_batch_files.py` dies at every call that changes a file, in turn; here the whole program runs
in processes of its own that get SIGKILL or SIGTERM, while it starts, computes, writes or ends.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.fork_server import ForkServer
from tests.tiny_checkpoint import arguments, tiny_checkpoint

STARTING = 3.0  # seconds that a start takes at most on a busy machine, roughly
POLL = 0.001


def requests(count: int) -> str:
    """Lines of many kinds: greedy and drawn, several samples, logprobs, stops, bad ones."""
    rng = random.Random(3)
    lines: list[str] = []
    for i in range(count):
        prompt = "".join(rng.choice("abcdefgh") for _ in range(rng.randint(1, 20)))
        body = {"custom_id": f"r{i}", "prompt": prompt, "max_tokens": rng.randint(1, 24)}
        body |= [{}, {"temperature": 0}, {"n": 3}, {"logprobs": 2}, {"stop": "a"}, {"n": 0}][i % 6]
        lines.append(json.dumps(body) if i % 17 else "not JSON")
    return "\n".join(lines) + "\n"


@dataclass
class Job:
    """One input and the outputs of its runs."""

    server: ForkServer
    folder: Path
    model: Path
    count: int
    rng: random.Random = field(default_factory=lambda: random.Random(11))
    num_outputs: int = 0
    wanted: bytes = b""

    def __post_init__(self) -> None:
        (self.folder / "in.jsonl").write_text(requests(self.count))
        self.renew()
        self.start()
        assert self.server.wait() == 3, self.log.read_text()
        self.wanted = self.out.read_bytes()
        assert self.wanted.count(b"\n") == self.count
        self.renew()

    @property
    def out(self) -> Path:
        return self.folder / f"out-{self.num_outputs}.jsonl"

    @property
    def partial(self) -> Path:
        return self.out.with_name(self.out.name + ".partial")

    @property
    def log(self) -> Path:
        return self.folder / f"log-{self.num_outputs}"

    def renew(self) -> None:
        """From here on another output."""
        self.num_outputs += 1

    def start(self) -> int:
        given = [self.folder / "in.jsonl", "--output", self.out, "--ordered"]
        return self.server.start([*given, "--model", self.model, *arguments()], self.log)

    def wait_for_answers(self, more: int, until: float) -> None:
        """Returns when the run wrote so many answers, or when it is time."""
        wanted = self.num_answers() + more
        while self.num_answers() < wanted and time.monotonic() < until and not self.out.exists():
            time.sleep(POLL)

    def num_answers(self) -> int:
        try:
            return self.partial.read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def whole_lines(self) -> bytes:
        try:
            data = self.partial.read_bytes()
        except FileNotFoundError:
            return b""
        return data[: data.rfind(b"\n") + 1]

    def finish(self) -> None:
        """Runs to the end: the output is that of the run that nobody killed."""
        self.start()
        status = self.server.wait()
        assert status == 3, self.log.read_text()
        self.check()

    def check(self) -> None:
        assert self.out.read_bytes() == self.wanted
        assert not self.partial.exists()
        ids = [json.loads(line)["custom_id"] for line in self.wanted.splitlines()]
        given = [i for i in ids if i is not None]
        assert len(given) == len(set(given)) == self.count - -(-self.count // 17)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    made = ForkServer(tmp_path_factory.mktemp("cache"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def kill_at_random(job: Job, number: signal.Signals, answers_per_run: int) -> int:
    """One run that a signal ends, if it does not end before; returns its exit status."""
    before = job.whole_lines()
    pid = job.start()
    if job.rng.random() < 0.2:
        time.sleep(job.rng.uniform(0.0, STARTING))
    else:
        job.wait_for_answers(job.rng.randint(0, answers_per_run), time.monotonic() + 60)
        time.sleep(job.rng.uniform(0.0, 0.005))
    os.kill(pid, number)  # nothing happens to one that has ended
    status = job.server.wait()
    if not job.out.exists():
        assert job.whole_lines().startswith(before), "an answer that was there is gone"
    return status


def kill_many(job: Job, kills: int, answers_per_run: int) -> None:
    done = 0
    while done < kills:
        status = kill_at_random(job, signal.SIGKILL, answers_per_run)
        assert status in (3, -signal.SIGKILL), job.log.read_text()
        done += status == -signal.SIGKILL
        if status == 3:
            job.check()
            job.renew()
    job.finish()


def test_twelve_kills_over_a_hundred_lines(server: ForkServer, model: Path, tmp_path: Path) -> None:
    kill_many(Job(server, tmp_path, model, 100), kills=12, answers_per_run=20)


@pytest.mark.slow
def test_two_hundred_kills_over_a_thousand_lines(
    server: ForkServer, model: Path, tmp_path: Path
) -> None:
    kill_many(Job(server, tmp_path, model, 1000), kills=200, answers_per_run=12)


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
