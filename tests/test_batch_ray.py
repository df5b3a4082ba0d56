"""The batch program on a Ray cluster of this machine: two workers with a real, tiny model.

Owns what only a cluster shows: that answers are the same bytes, and what a death costs. Programs
run in processes of their own. One cluster is started for all tests, which join it; a job that
starts its own is tested once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.tiny_checkpoint import arguments, tiny_checkpoint
from tests.tiny_job import requests

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "serve_batch.py"
PATIENCE = 300.0  # seconds for anything here, on a busy machine
POLL = 0.05
WORKERS = 2
NUM_LINES = 600

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'pagedjax[ray]'"
)


def environment(cache: Path) -> dict[str, str]:
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # of the clusters that these tests start
    }


@dataclass
class Desk:
    """One input, its answers without a cluster, and programs that answer it."""

    folder: Path
    model: Path
    variables: dict[str, str]
    wanted: bytes = b""
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "in.jsonl").write_text(requests(NUM_LINES))
        assert self.run(self.folder / "local.jsonl") == 3
        self.wanted = (self.folder / "local.jsonl").read_bytes()
        assert self.wanted.count(b"\n") == NUM_LINES

    def start(self, out: Path, *more: object, **variables: str) -> subprocess.Popen[bytes]:
        given = [self.folder / "in.jsonl", "--output", out, "--ordered", "--model", self.model]
        with out.with_suffix(".log").open("ab") as log, out.with_suffix(".out").open("ab") as said:
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT), *map(str, given), *arguments(), *map(str, more)],
                stdin=subprocess.DEVNULL, stdout=said, stderr=log,
                env={**self.variables, **variables},
            )  # fmt: skip
        self.started.append(process)
        return process

    def run(self, out: Path, *more: object, **variables: str) -> int:
        return self.start(out, *more, **variables).wait(PATIENCE)

    def check(self, out: Path) -> None:
        assert out.read_bytes() == self.wanted, out.with_suffix(".log").read_text()
        assert not out.with_name(out.name + ".partial").exists()
        assert out.with_suffix(".out").read_bytes() == b"", "standard output is for answers"


def log_of(out: Path) -> str:
    return out.with_suffix(".log").read_text()


def wait_for_answers(out: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    """Returns when the journal holds so many."""
    partial, until = out.with_name(out.name + ".partial"), time.monotonic() + PATIENCE
    while not partial.exists() or partial.read_bytes().count(b"\n") < count:
        assert process.poll() is None, log_of(out)
        assert time.monotonic() < until, log_of(out)
        time.sleep(POLL)


def engines(above: int) -> list[psutil.Process]:
    """Processes below another one that hold an engine."""
    found: list[psutil.Process] = []
    for process in psutil.Process(above).children(recursive=True):
        try:
            if "EngineWorker" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue  # it ended meanwhile
    return found


def wait_until_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE)
    assert not alive


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("ray")
    made = Desk(
        folder, tiny_checkpoint(tmp_path_factory.mktemp("model")), environment(folder / "cache")
    )
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
            process.wait()


def start_cluster(
    desk: Desk, command: list[str], said: Path
) -> tuple[subprocess.Popen[bytes], str | None]:
    """The process above all of its, and its address; None: it ended."""
    with said.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=desk.variables
        )
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and process.poll() is None:
        # Ray chooses the interface
        if found := re.search(r"--address='([^']+:\d+)'", said.read_text()):
            return process, found[1]
        time.sleep(POLL)
    return process, None


@pytest.fixture(scope="module")
def cluster(desk: Desk) -> Iterator[tuple[int, str]]:
    """A cluster of one machine: the process above all of its, and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    options = {
        "port": port,
        "num-cpus": WORKERS,
        "object-store-memory": 128 * 2**20,
        "include-dashboard": "false",
        "disable-usage-stats": None,
    }
    for name, value in options.items():
        command.append(f"--{name}" if value is None else f"--{name}={value}")
    said = desk.folder / "cluster.log"
    process, address = start_cluster(desk, command, said)
    if address is None:  # Ray gives itself 30 s, which a busy machine may exceed
        process, address = start_cluster(desk, command, said)
    assert address is not None, said.read_text()
    yield process.pid, address
    below = psutil.Process(process.pid).children(recursive=True)
    process.kill()  # asked to end, it would wait half a minute for work to drain
    process.wait(PATIENCE)
    for child in below:
        with suppress(psutil.NoSuchProcess):
            child.kill()


def test_workers_that_are_killed_cost_no_answer_and_no_byte(
    desk: Desk, cluster: tuple[int, str]
) -> None:
    out = desk.folder / "killed.jsonl"
    above, address = cluster
    # So many lines that a worker is never without one while Ray, ten times a second, brings others.
    given = ("--max-inflight", 64, "--ray", address, "--ray-workers", WORKERS)
    process = desk.start(out, *given)
    wait_for_answers(out, 100, process)
    both = engines(above)
    assert len(both) == WORKERS
    both[0].kill()  # it may have been loading its model: then the other one gave all answers
    wait_for_answers(out, 250, process)
    for worker in engines(above):
        worker.kill()
    assert process.wait(PATIENCE) == 3, log_of(out)
    desk.check(out)
    assert "lines that they had begun run again" in log_of(out)
    wait_until_gone(engines(above))


def test_what_stops_a_worker_from_starting_is_said_once_and_nothing_is_lost(
    desk: Desk, cluster: tuple[int, str]
) -> None:
    out = desk.folder / "refused.jsonl"
    out.write_text("from another job\n")
    status = desk.run(out, "--max-model-len", 10**6, "--overwrite", "--ray", cluster[1])
    assert status == 2
    shown = log_of(out)
    assert shown.count("`max_model_len` must be at most") == 1, shown
    assert "Traceback" not in shown
    assert out.read_text() == "from another job\n"


def test_a_driver_that_is_killed_leaves_no_worker_and_its_job_goes_on_without_ray(
    desk: Desk, cluster: tuple[int, str]
) -> None:
    out = desk.folder / "driver.jsonl"
    above, address = cluster
    process = desk.start(out, "--max-inflight", 16, "--ray", address)
    wait_for_answers(out, 100, process)
    left = engines(above)
    assert left
    process.kill()
    process.wait(PATIENCE)
    wait_until_gone(left)
    before = out.with_name(out.name + ".partial").read_bytes()
    assert desk.run(out) == 3
    desk.check(out)
    done = before[: before.rfind(b"\n") + 1].splitlines()
    assert f"{len(done)} were done before" in log_of(out), "nothing is computed twice"


@pytest.mark.slow
def test_a_cluster_of_its_own_ends_with_the_job_which_goes_on_elsewhere(
    desk: Desk, cluster: tuple[int, str]
) -> None:
    out = desk.folder / "own.jsonl"
    process = desk.start(out, "--max-inflight", 16, "--ray", "--ray-workers", WORKERS)
    wait_for_answers(out, 100, process)
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(below) > WORKERS
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 75, log_of(out)
    assert "run the same command again to continue" in log_of(out)
    wait_until_gone(below)
    assert desk.run(out, "--ray", cluster[1]) == 3
    desk.check(out)


@pytest.mark.slow
def test_a_cluster_that_is_lost_ends_the_job_so_that_it_can_go_on(desk: Desk) -> None:
    out = desk.folder / "lost.jsonl"
    process = desk.start(out, "--max-inflight", 16, "--ray", "--ray-workers", WORKERS)
    wait_for_answers(out, 100, process)
    below = psutil.Process(process.pid).children(recursive=True)
    (raylet,) = [child for child in below if child.name() == "raylet"]
    raylet.kill()
    assert process.wait(PATIENCE) == 75, log_of(out)
    assert "the Ray cluster is gone" in log_of(out)
    wait_until_gone(below)
    assert desk.run(out) == 3
    desk.check(out)


# What a worker imports first: it dies of the line "fedcba", whatever else it has.
POISON = """
import os
def hook():
    from pagedjax.batch_job.on_ray.worker import SharedEngine
    whole = SharedEngine.answer
    def answer(self, entries):
        if any(b'"fedcba"' in raw for _, raw in entries):
            os.kill(os.getpid(), 9)
        return whole(self, entries)
    SharedEngine.answer = answer
import sys
if any("ray" in part for part in sys.argv) or "RAY_JOB_ID" in os.environ:
    hook()
"""


@pytest.mark.slow
def test_a_line_that_kills_every_worker_gets_an_error(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(POISON)
    out = desk.folder / "poison.jsonl"
    source = tmp_path / "in.jsonl"
    lines = [json.dumps({"prompt": "abc", "max_tokens": 3}) for _ in range(40)]
    lines[25] = json.dumps({"prompt": "fedcba", "max_tokens": 3})
    source.write_text("\n".join(lines) + "\n")
    command = [sys.executable, SCRIPT, source, "--output", out, "--model", desk.model]
    options = [*arguments(), "--max-inflight", 8, "--ray", "--ray-workers", WORKERS]
    shown = subprocess.run(
        [*map(str, command), *map(str, options)],
        env={**desk.variables, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True, text=True, timeout=2 * PATIENCE, check=False,
    )  # fmt: skip
    assert shown.returncode == 3, shown.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({row["custom_id"] for row in rows}) == 40
    (failed,) = [row for row in rows if row["error"]]
    assert failed["custom_id"] == "line-26"
    assert failed["error"]["code"] == "worker_died"
