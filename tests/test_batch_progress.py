"""What is seen of a running job: on a terminal of 80 columns, in a log, in a file of figures."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from io import StringIO
from os import terminal_size
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagedjax.batch_job import Summary, messages, progress
from pagedjax.batch_job.meter import Meter, duration
from pagedjax.batch_job.progress import Progress
from pagedjax.paging import PageAllocator
from tests.batch_fakes import FakeEngine, FakeScheduler
from tests.terminal import Terminal


class Clock:
    """Seconds that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        for module in ("pagedjax.batch_job.progress.time", "pagedjax.batch_job.meter.time"):
            monkeypatch.setattr(f"{module}.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


SUMMARY = Summary(answered=20, failed=4, answered_before=5, failed_before=1, blank=2, seconds=12.0)


def test_figures_are_counts_rates_and_the_time_left(clock: Clock, engine: FakeEngine) -> None:
    meter = Meter(FakeScheduler(engine), 100, lambda: clock.now)
    engine.num_steps, clock.now = 50, 110.0  # 10 prompt tokens and 4 others a step
    figures = meter.read(SUMMARY)
    assert (figures.prompt_tokens_per_s, figures.output_tokens_per_s) == (50.0, 20.0)
    assert (figures.lines, figures.answered, figures.failed, figures.done_before) == (32, 20, 4, 6)
    assert figures.eta_seconds == (100 - 32) * 12.0 / 24
    assert str(figures) == (
        "32 of 100 lines: 20 answered, 4 failed, 6 done before; in 50 out 20 tok/s, 0 run 1 wait, "
        "KV 50%, prefix hits 25%, 3 preempted; about 34 s left"
    )


def test_rates_are_of_the_last_ten_seconds(clock: Clock, engine: FakeEngine) -> None:
    meter = Meter(FakeScheduler(engine), None, lambda: clock.now)
    for _ in range(30):  # a step a second, then ten
        engine.num_steps, clock.now = engine.num_steps + 1, clock.now + 1
        assert meter.read(SUMMARY).output_tokens_per_s == 4.0
    for _ in range(9):
        engine.num_steps, clock.now = engine.num_steps + 10, clock.now + 1
        assert 4.0 < meter.read(SUMMARY).output_tokens_per_s < 40.0
    engine.num_steps, clock.now = engine.num_steps + 10, clock.now + 1
    figures = meter.read(SUMMARY)
    assert figures.output_tokens_per_s == 40.0
    assert figures.eta_seconds is None
    assert str(figures).startswith("32 lines: ")


def test_no_time_is_no_rate(clock: Clock, engine: FakeEngine) -> None:
    figures = Meter(FakeScheduler(engine), 10, lambda: clock.now).read(Summary())
    assert (figures.prompt_tokens_per_s, figures.eta_seconds) == (0.0, None)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (119, "119 s"), (150, "2 min"), (9000, "2.5 h")]
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_without_a_terminal_there_is_a_line_every_ten_seconds(
    clock: Clock, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress(FakeScheduler(engine), 100) as shown:
        for _ in range(41):
            shown(SUMMARY)
            clock.now += 0.5
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("serve_batch: 32 of 100 lines: 20 answered") for line in lines)


def test_figures_are_written_once_a_second_and_at_the_end(clock: Clock, engine: FakeEngine) -> None:
    file = StringIO()
    with Progress(FakeScheduler(engine), 100, stats=file) as shown:
        for _ in range(9):
            shown(SUMMARY)
            clock.now += 0.25
        shown.finish(replace(SUMMARY, answered=21))
    records = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [record["final"] for record in records] == [False, False, False, True]
    assert [record["answered"] for record in records] == [20, 20, 20, 21]
    assert {"time", "seconds", "kv_usage", "prefix_hit_rate", "preemptions"} <= records[0].keys()


def test_a_file_of_figures_that_fails_stops_nothing(
    clock: Clock, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        progress.stats_file("/dev/full") as file,
        Progress(FakeScheduler(engine), 9, stats=file) as shown,
    ):
        for _ in range(5):
            shown(SUMMARY)
            clock.now += 1
    assert capsys.readouterr().err.count("no more figures are written: No space left") == 1


def test_a_file_of_figures_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "stats"
    path.write_text("{}\n")
    with progress.stats_file(str(path)) as file:
        assert file is not None
        file.write("{}\n")
    assert path.read_text() == "{}\n{}\n"


# ---------------------------------------------------------------------------------- terminals


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    made = Terminal(80)
    monkeypatch.setattr(messages, "sys", SimpleNamespace(stderr=made))
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_: terminal_size((80, 24)))
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda _: (80, 24))
    return made


def paged(engine: FakeEngine, pool: PageAllocator, host_pages: int = 0) -> Any:
    fake = FakeScheduler(engine)
    return SimpleNamespace(
        stats=fake.stats, num_running=8, num_waiting=24, allocator=pool,
        roster=SimpleNamespace(running=[]), config=SimpleNamespace(num_host_pages=host_pages),
        host=SimpleNamespace(allocator=PageAllocator(host_pages + 1) if host_pages else None),
    )  # fmt: skip


def test_terminal_shows_a_bar_and_the_engine(
    clock: Clock, engine: FakeEngine, terminal: Terminal
) -> None:
    with Progress(FakeScheduler(engine), 100, num_before=6) as shown:
        shown(SUMMARY)
        bar, figures = terminal.screen()[:2]
        assert bar.startswith(" 32%|")
        assert bar.endswith(", 4 failed]")
        assert " 32/100 [" in bar
        assert len(bar) <= 80
        assert figures == "in 0 out 0 tok/s, 0 run 1 wait, KV 50%, prefix hits 25%, 3 preempted"
        messages.say("a message")
        lines = [line for line in terminal.screen() if line]
        assert lines[0] == "serve_batch: a message", "it is above the bar"
        assert lines[1].startswith(" 32%|")
        assert lines[2] == figures
        shown.finish(replace(SUMMARY, answered=88))
    lines = [line for line in terminal.screen() if line]
    assert lines[-1].startswith("100%|")
    assert "tok/s" not in "".join(lines), "the bar stays, what was below it goes"


def test_terminal_shows_the_page_map_below(
    clock: Clock, engine: FakeEngine, terminal: Terminal
) -> None:
    pool = PageAllocator(201)
    pool.allocate(30)
    with Progress(paged(engine, pool, host_pages=50), 100, shows_pages=True) as shown:
        shown(SUMMARY)
        pool.allocate(20)
        clock.now += 60
        shown(SUMMARY)
        lines = terminal.screen()
        assert lines[2] == "pages: 50 held #  0 shared 2-9+  0 cached o  150 free ."
        assert lines[3:6] == ["#" * 50 + "." * 29, "." * 79, "." * 42]
        assert lines[6].startswith("host pages: 0 held")
        assert lines[7] == "." * 50
        assert "\x1b[2m" in terminal.getvalue(), "colours"


def test_no_color_is_heeded(
    clock: Clock, engine: FakeEngine, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with Progress(paged(engine, PageAllocator(9)), 100, shows_pages=True) as shown:
        shown(SUMMARY)
        assert terminal.screen()[3] == "........"
    assert "\x1b[2m" not in terminal.getvalue()


def test_page_map_takes_little_of_the_time(
    clock: Clock, engine: FakeEngine, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[float] = []

    def draw(scheduler: Any, *, width: int) -> list[str]:
        drawn.append(clock.now)
        clock.now += 0.1  # a large pool
        return []

    monkeypatch.setattr(progress, "pages_of", draw)
    with Progress(paged(engine, PageAllocator(9)), 100, shows_pages=True) as shown:
        for _ in range(200):
            shown(SUMMARY)
            clock.now += 0.1
    assert 3 <= len(drawn) <= 6, "about 20 s at 2 % are 0.4 s"


def test_page_map_needs_a_terminal(
    clock: Clock, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress(FakeScheduler(engine), 100, shows_pages=True) as shown:
        shown(SUMMARY)
    assert capsys.readouterr().err == "serve_batch: --page-map draws on terminals only\n"
