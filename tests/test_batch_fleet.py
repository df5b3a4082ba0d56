"""A job on many engines, but for Ray itself: rounds, deaths, groups, who is heard; with fakes.

`test_batch_ray.py` runs the same parts on a cluster.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from pagedjax.batch_job import Summary, main, run_batch
from pagedjax.batch_job.answers import InputOrder
from pagedjax.batch_job.entry import Line, answer_text, without_mark
from pagedjax.batch_job.errors import CannotStart, EnginesLost, InputChanged
from pagedjax.batch_job.lines import MAX_LINE_BYTES
from pagedjax.batch_job.on_ray import WorkerPlan, cluster, run_on_fleet
from pagedjax.batch_job.on_ray import job as fleet_job
from pagedjax.batch_job.on_ray.counters import FleetCounters
from pagedjax.batch_job.on_ray.feed import GROUP_BYTES, groups
from pagedjax.batch_job.on_ray.roster import Roll, Roster
from pagedjax.batch_job.on_ray.worker import SharedEngine, figures_of
from pagedjax.batch_job.source import Source, open_source
from tests.batch_fakes import FakeEngine, FakeLLM

type Row = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
IN_FLIGHT = 4  # lines that die together


class FakeFleet:
    """Workers that die of certain lines, together with the lines beside them."""

    def __init__(self, poison: set[int] | None = None, *, last: int | None = None) -> None:
        """`last`: no worker begins a line after that many, ever."""
        self.poison, self.last = poison or set(), last
        self.rounds: list[tuple[list[int], bool]] = []
        self.said: list[str] = []
        self.last_begun: set[int] = set()
        self.feed_trouble: str | None = None
        self.counters = FleetCounters()

    def say(self, text: str) -> None:
        self.said.append(text)

    def answers(
        self, todo: bytes, stamp: tuple[int, int], *, alone: bool = False
    ) -> Iterator[list[tuple[int, str]]]:
        assert stamp[0] > 0
        wanted = [number for number, byte in enumerate(todo) if byte]
        self.rounds.append((wanted, alone))
        begun = wanted if self.last is None else [n for n in wanted if n <= self.last]
        size = 1 if alone else IN_FLIGHT
        for first in range(0, len(begun), size):
            group = begun[first : first + size]
            yield []
            if not self.poison & set(group):
                yield [(number, answer(number)) for number in group]
        self.last_begun = set(begun)


def answer(number: int) -> str:
    body = {"usage": {"prompt_tokens": 2, "completion_tokens": number}}
    return answer_text(Line(number, f"line-{number}"), 200, body, None)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    """Twenty lines; 3 is blank, 5 cannot be read."""
    lines = [json.dumps({"prompt": f"p{i}"}) for i in range(1, 21)]
    lines[2], lines[4] = "", "not JSON"
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(lines) + "\n")
    with ExitStack() as stack:
        yield open_source(str(path), stack)


def run(fleet: Any, source: Source, **how: Any) -> tuple[list[Row], Summary]:
    written: list[str] = []
    summary = run_on_fleet(fleet, source, InputOrder(written.append), before=Summary(), **how)
    return [json.loads(text) for text in written], summary


def numbers(rows: list[Row]) -> list[int]:
    return [int(row["custom_id"].removeprefix("line-")) if row["custom_id"] else 5 for row in rows]


GOOD = [n for n in range(1, 21) if n not in (3, 5)]


# ------------------------------------------------------------------------------------------- rounds


def test_every_line_is_answered_once_in_one_round(source: Source) -> None:
    fleet = FakeFleet()
    rows, summary = run(fleet, source)
    assert fleet.rounds == [(GOOD, False)]
    assert numbers(rows) == [n for n in range(1, 21) if n != 3]
    assert [row["error"]["message"][:7] for row in rows if row["error"]] == ["line 5:"]
    assert (summary.answered, summary.failed, summary.blank) == (18, 1, 1)
    assert (summary.prompt_tokens, summary.output_tokens) == (36, sum(GOOD))
    assert not fleet.said
    assert not summary.interrupted


def test_lines_that_were_answered_before_are_given_to_nobody(source: Source) -> None:
    class Before(InputOrder):
        def expect(self, number: int, key: str) -> bool:
            return number > 10 and super().expect(number, key)

    fleet = FakeFleet()
    summary = run_on_fleet(fleet, source, Before(lambda text: None), before=Summary())  # type: ignore[arg-type]
    assert fleet.rounds == [(list(range(11, 21)), False)]
    assert summary.answered == 10


def test_a_line_that_kills_its_worker_gets_an_error_and_its_neighbours_answers(
    source: Source,
) -> None:
    fleet = FakeFleet({8})
    rows, summary = run(fleet, source)
    first, beside = fleet.rounds[0], [7, 8, 9, 10]  # of 1 2 4 6, 7 8 9 10, ...
    assert first == (GOOD, False)
    assert fleet.rounds[1:] == [(beside, False), (beside, True), ([8], True)]
    failed = {row["custom_id"]: row for row in rows if row["error"]}
    assert failed.keys() == {None, "line-8"}
    assert failed["line-8"]["error"]["code"] == "worker_died"
    assert (
        "line 8: the worker that ran this line died, 4 times"
        in (failed["line-8"]["error"]["message"])
    )
    assert failed["line-8"]["response"]["status_code"] == 500
    assert (summary.answered, summary.failed) == (17, 2)
    assert fleet.said[0] == "warning: workers died; 4 lines that they had begun run again"


def test_a_worker_that_dies_once_costs_its_lines_one_more_round(source: Source) -> None:
    class DiesOnce(FakeFleet):
        def answers(self, *given: Any, **how: Any) -> Iterator[list[tuple[int, str]]]:
            yield from super().answers(*given, **how)
            self.poison = set()

    fleet = DiesOnce({12})
    rows, summary = run(fleet, source)
    assert [len(wanted) for wanted, _ in fleet.rounds] == [18, 4]
    assert numbers(rows) == [n for n in range(1, 21) if n != 3]
    assert (summary.answered, summary.failed) == (18, 1)


def test_lines_that_were_not_begun_have_not_died(source: Source) -> None:
    """The feed's machine was lost: nobody is to blame, and the next round goes on."""

    class Short(FakeFleet):
        def answers(self, *given: Any, **how: Any) -> Iterator[list[tuple[int, str]]]:
            yield from super().answers(*given, **how)
            self.last = None if self.last is None else self.last + 5

    fleet = Short(last=10)
    rows, _ = run(fleet, source)
    assert [len(wanted) for wanted, _ in fleet.rounds] == [18, 10, 5]
    assert not any(alone for _, alone in fleet.rounds)
    assert not fleet.said
    assert numbers(rows) == [n for n in range(1, 21) if n != 3]


def test_workers_that_die_of_every_line_are_the_fault_of_none(source: Source) -> None:
    fleet = FakeFleet(set(GOOD))
    written: list[str] = []
    with pytest.raises(EnginesLost, match="every worker dies, whichever line it has"):
        run_on_fleet(fleet, source, InputOrder(written.append), before=Summary())  # type: ignore[arg-type]
    assert len(fleet.rounds) == 3
    assert [json.loads(text)["error"]["code"] for text in written] == ["invalid_json"]


def test_workers_that_begin_nothing_are_given_up(source: Source) -> None:
    fleet = FakeFleet(last=0)
    with pytest.raises(EnginesLost, match="end before they begin a line"):
        run(fleet, source)
    assert len(fleet.rounds) == fleet_job.IDLE_ROUNDS


def test_an_input_that_the_feed_finds_changed_ends_the_job(source: Source) -> None:
    fleet = FakeFleet(last=0)
    fleet.feed_trouble = "the input was written while it was read"
    with pytest.raises(InputChanged):
        run(fleet, source)


def test_a_stop_keeps_what_came_and_asks_for_no_other_round(source: Source) -> None:
    fleet, seen = FakeFleet(), list[Summary]()
    rows, summary = run(fleet, source, on_progress=seen.append, should_stop=lambda: len(seen) >= 4)
    assert summary.interrupted
    assert numbers(rows) == [1, 2, 4, 5, 6, 7, 8, 9, 10]
    assert len(fleet.rounds) == 1


# --------------------------------------------------------------------------------------------- feed


def lines_of(source: Source) -> list[bytes]:
    return list(source.lines())


def test_groups_hold_the_wanted_lines_with_their_ids(source: Source) -> None:
    todo = bytes(int(n in (1, 2, 6, 7, 20)) for n in range(21))
    found = list(groups(source.lines(), todo, 2))
    assert [group["numbers"] for group in found] == [[1, 2], [6, 7], [20]]
    assert found[1]["custom_ids"] == ["line-6", "line-7"]
    assert found[1]["lines"] == lines_of(source)[5:7]


def test_ids_depend_on_lines_that_are_not_wanted() -> None:
    lines = [b'{"prompt": "a", "custom_id": "line-2"}', b'{"prompt": "b"}']
    assert [g["custom_ids"] for g in groups(iter(lines), b"\0\0\1", 4)] == [["line-2-2"]]


def test_long_lines_close_a_group() -> None:
    line = b'{"prompt": "' + b"a" * (GROUP_BYTES // 2) + b'"}'
    assert len(line) < MAX_LINE_BYTES
    found = groups(iter([line] * 5), b"\0" + b"\1" * 5, 64)
    assert [group["numbers"] for group in found] == [[1, 2], [3, 4], [5]]


@pytest.mark.parametrize(
    ("in_flight", "calls", "lines"),
    [(1, 1, 1), (4, 1, 4), (5, 2, 3), (32, 8, 4), (128, 16, 8), (1024, 16, 64), (9999, 16, 64)],
)
def test_groups_are_few_and_fill_the_engine(in_flight: int, calls: int, lines: int) -> None:
    plan = WorkerPlan(model="m", identity="i", in_flight=in_flight)
    assert plan.shape(alone=False) == (calls, lines)
    assert plan.shape(alone=True) == (1, 1)


# ------------------------------------------------------------------------------------------- engine


def entries(*prompts: str, first: int = 1) -> list[tuple[Line, bytes]]:
    found: list[tuple[Line, bytes]] = []
    for number, prompt in enumerate(prompts, first):
        raw = json.dumps({"prompt": prompt, "max_tokens": 9}).encode() + b"\n"
        found.append((Line(number, f"line-{number}"), raw))
    return found


def fails(error: Exception) -> None:
    raise AssertionError("the engine failed") from error


def local(*given: tuple[Line, bytes]) -> dict[int, str]:
    """What the job answers without a cluster."""
    written: list[str] = []
    run_batch(FakeLLM(), [raw for _, raw in given], InputOrder(written.append))
    return {line.number: text for (line, _), text in zip(given, written, strict=True)}


def test_groups_share_an_engine_and_get_their_own_answers() -> None:
    llm = FakeLLM()
    engine = SharedEngine(llm, None, fails)
    asked = entries(*(f"prompt {i}" * (1 + i % 3) for i in range(24)))
    got: dict[int, dict[int, str]] = {}

    def ask(start: int) -> None:
        group = asked[start : start + 6]
        got[start] = dict(pair for ready in engine.answer(group) for pair in ready)

    threads = [threading.Thread(target=ask, args=(start,)) for start in range(0, 24, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [sorted(got[start]) for start in (0, 6, 12, 18)] == [
        list(range(start + 1, start + 7)) for start in (0, 6, 12, 18)
    ]
    wanted = local(*asked)
    assert {number: text for part in got.values() for number, text in part.items()} == wanted


def test_a_bad_body_and_a_byte_order_mark_are_handled_as_without_a_cluster() -> None:
    asked = [
        (Line(1, "line-1"), b'\xef\xbb\xbf{"prompt": "ab", "n": 0}'),
        (Line(2, "line-2"), b'{"prompt": "ab"}'),
        (Line(3, "line-3"), b'{"prompt": "boom"}'),
    ]
    engine = SharedEngine(FakeLLM(), None, fails)
    got = dict(pair for ready in engine.answer(asked) for pair in ready)
    assert got == local(*asked)
    assert without_mark(asked[0][1]).startswith(b"{")


def test_answers_are_handed_over_before_the_group_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedjax.batch_job.on_ray.worker.HANDOVER_SECONDS", 0.01)
    held = threading.Event()

    class Holds(FakeEngine):
        def step(self) -> Any:
            if any(state[0] > 3 for state in self.running.values()) and self.num_steps > 2:
                held.wait(60)
            return super().step()

    engine = SharedEngine(FakeLLM(engine=Holds()), None, fails)
    parts = engine.answer(entries("a", "a long one"))
    assert [number for number, _ in next(parts)] == [1]
    held.set()
    assert [number for ready in parts for number, _ in ready] == [2]


def test_an_engine_that_fails_is_reported_from_its_thread() -> None:
    failed: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    engine = SharedEngine(FakeLLM(), None, failed.put)
    parts = engine.answer(entries("crash"))
    threading.Thread(target=lambda: next(parts), daemon=True).start()
    assert "the device is gone" in str(failed.get(timeout=60))


# ------------------------------------------------------------------------------------------- roster


def test_the_roster_tells_who_is_silent_and_hands_notes_over_once() -> None:
    now = [0.0]
    roster = Roster(lambda: now[0])
    roster.join("a")
    now[0] = 3.0
    roster.join("b")
    roster.ready("b")
    roster.report("b", {"num_running": 2})
    roster.note("something")
    roster.begin([4, 5])
    roster.begin([5, 6])
    now[0] = 5.0
    roll = roster.read()
    assert roll.silent == {"a": 5.0, "b": 2.0}
    assert (roll.num_joined, roll.num_ready, roll.num_begun) == (2, 1, 3)
    assert roll.notes == ["something"]
    assert roster.read().notes == []
    assert roster.begun() == {4, 5, 6}
    assert roster.todo() is None
    roster.publish(b"\0\1", (1, 2))
    assert roster.todo() == (b"\0\1", (1, 2))


def test_figures_of_many_engines_are_sums_and_means() -> None:
    llm = FakeLLM()
    llm.engine.num_steps = 3
    one = figures_of(llm.engine.scheduler)
    assert figures_of(None) == {}
    counters = FleetCounters()
    counters.update(
        Roll(figures={"a": one, "b": one, "new": {}}, silent={"a": 0.5, "b": 99.0, "new": 0.1})
    )
    assert counters.stats.num_prompt_tokens == 60
    assert counters.stats.num_generated_tokens == 24
    assert counters.stats.num_preemptions == 6
    assert counters.num_waiting == 1, "b is not heard any more"
    assert counters.stats.kv_usage == 0.5
    assert counters.stats.prefix_hit_rate == 0.25
    counters.update(Roll(silent={"a": 0.5}))
    assert counters.stats.num_generated_tokens == 24, "what was done stays done"


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"ray_workers": 2}, "--ray-workers must be at least 1, beside --ray. Got it without"),
        ({"ray": "", "ray_workers": 0}, "--ray-workers must be at least 1, beside --ray. Got 0"),
        ({"ray": "", "page_map": True}, "--page-map must be used without --ray"),
        ({"ray": "ray://a:1"}, "--ray must be given on a machine of the cluster"),
    ],
)
def test_options_that_make_no_sense(
    how: Row, message: str, source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(
        "pagedjax.batch_job.loading.identify", lambda model: {"name": model, "identity": "i"}
    )
    out = tmp_path / "out"
    assert main(str(source.path), str(out), model="m", options={}, **how) == 2
    assert message in capsys.readouterr().err
    assert not out.with_name("out.partial").exists()


def test_an_event_log_is_refused(
    source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"event_log": str(tmp_path / "log")}
    assert main(str(source.path), str(tmp_path / "out"), model="m", options=options, ray="") == 2
    assert "--event-log must be used without --ray" in capsys.readouterr().err


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with ExitStack() as stack, pytest.raises(CannotStart, match=r"pip install 'pagedjax\[ray\]'"):
        cluster.connect("", None, stack)


class SlowRay:
    """Starts at its third attempt, if it does."""

    def __init__(self, *errors: str) -> None:
        self.errors, self.calls = list(errors), list[str]()

    def init(self, **how: Any) -> None:
        self.calls.append(how["address"])
        if self.errors:
            raise RuntimeError(self.errors.pop(0))

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def test_a_cluster_that_is_slow_to_start_gets_another_chance() -> None:
    ray = SlowRay("the node timed out", "the node timed out")
    cluster.start(ray)
    assert ray.calls == ["local", "shutdown", "local", "shutdown", "local"]
    with pytest.raises(RuntimeError, match="timed out"):
        cluster.start(SlowRay(*["it timed out"] * 3))
    other = SlowRay("no such folder", "and no other")
    with pytest.raises(RuntimeError, match="no such folder"):
        cluster.start(other)
    assert other.calls == ["local", "shutdown"]


class FakeRay:
    """What a cluster offers."""

    def __init__(self, **offered: float) -> None:
        self.offered = offered

    def cluster_resources(self) -> dict[str, float]:
        return self.offered

    def nodes(self) -> list[Row]:
        each = {"Alive": True, "Resources": {"CPU": self.offered.get("CPU", 0)}}
        return [each, {"Alive": False, "Resources": {"CPU": 9}}]

    def get_runtime_context(self) -> Any:
        return self

    def get_node_id(self) -> str:
        return "here"


@pytest.mark.parametrize(
    ("offered", "asked", "found", "each"),
    [
        ({"CPU": 8, "GPU": 4}, None, 4, {"num_gpus": 1}),
        ({"CPU": 8, "GPU": 4}, 2, 2, {"num_gpus": 1}),
        ({"CPU": 8, "TPU": 4}, None, 4, {"resources": {"TPU": 1}}),
        ({"CPU": 8}, None, 1, {"num_cpus": 1}),
        ({"CPU": 8}, 3, 3, {"num_cpus": 1}),
    ],
)
def test_one_engine_for_each_accelerator_or_host(
    offered: dict[str, float], asked: int | None, found: int, each: Row
) -> None:
    made = cluster.offer(FakeRay(**offered), asked)
    assert (made.num_workers, made.resources) == (found, each)
    assert made.on_accelerator == ("CPU" not in str(each).upper())


@pytest.mark.parametrize(
    ("offered", "asked", "message"),
    [
        ({"GPU": 2}, 3, "at most 2, the cluster's GPUs. Got 3"),
        ({"CPU": 2}, 3, "at most 2, the cluster's CPUs. Got 3"),
        ({"memory": 1}, None, "must offer a GPU, a TPU or a CPU"),
    ],
)
def test_more_engines_than_there_is_room_for(
    offered: dict[str, float], asked: int | None, message: str
) -> None:
    with pytest.raises(CannotStart, match=message):
        cluster.offer(FakeRay(**offered), asked)


# -------------------------------------------------------------------------------------------- guard

GUARDED = """
import os, signal, sys, time
from pagedjax.batch_job.on_ray import guarded
def run():
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(75))
    print("began", os.getpid(), flush=True)
    {what}
    return 3
sys.exit(guarded(run, frozenset({{3, 75}}), 70, "gone by {{how}}"))
"""


def start_guarded(what: str) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [sys.executable, "-c", GUARDED.format(what=what)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    return process, int(process.stdout.readline().split()[1])


@pytest.mark.parametrize(
    ("what", "status", "said"),
    [
        ("pass", 3, ""),
        ("os._exit(75)", 75, ""),
        ("os._exit(1)", 70, "gone by exit status 1\n"),
        ("os.kill(os.getpid(), 9)", 70, "gone by signal 9\n"),
    ],
)
def test_a_job_that_ray_ends_is_told_from_one_that_ended(what: str, status: int, said: str) -> None:
    process, _ = start_guarded(what)
    assert process.communicate(timeout=60) == ("", said)
    assert process.returncode == status


def test_a_signal_reaches_the_job_through_its_guard() -> None:
    process, child = start_guarded("time.sleep(60)")
    assert os.getpgid(child) == child, "a terminal's Ctrl-C must not come twice"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 75


def test_a_guard_that_is_killed_takes_the_job_with_it() -> None:
    process, child = start_guarded("time.sleep(60)")
    job = psutil.Process(child)
    process.kill()
    process.communicate(timeout=60)
    assert psutil.wait_procs([job], timeout=60)[1] == []
