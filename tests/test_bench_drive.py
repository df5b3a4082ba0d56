"""The open loop: requests come when they are due, and their times count from then."""

from __future__ import annotations

import io
import json
import sys
import types
from collections.abc import Sequence
from typing import Any

import pytest

from scripts.peers import worker
from scripts.peers.drive import Clock, WrongAnswer, drive


class FakeClock(Clock):
    """Time passes when somebody sleeps or an engine steps."""

    def __init__(self) -> None:
        self.time = 100.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds


class FakeEngine:
    """Gives every running request a token in each step; a step takes `seconds`."""

    version = "1"

    def __init__(self, clock: FakeClock, seconds: float = 1.0, extra: int = 0) -> None:
        self.clock, self.seconds, self.extra = clock, seconds, extra
        self.options: dict[str, Any] = {}
        self.left: dict[int, int] = {}
        self.added: list[tuple[int, float]] = []

    def add(self, index: int, prompt_ids: Sequence[int], max_new: int) -> None:
        assert len(prompt_ids) > 0
        self.added.append((index, self.clock.time - 100.0))
        self.left[index] = max_new + self.extra

    def step(self, wait: float) -> list[tuple[int, list[int], bool]]:
        assert wait >= 0
        self.clock.time += self.seconds
        advanced = []
        for index in list(self.left):
            self.left[index] -= 1
            advanced.append((index, [index], self.left[index] == 0))
            if self.left[index] == 0:
                del self.left[index]
        return advanced


def request(arrival_s: float | None, max_new: int = 2) -> dict[str, Any]:
    made: dict[str, Any] = {"prompt_ids": [1, 2], "max_new": max_new}
    return made if arrival_s is None else made | {"arrival_s": arrival_s}


def test_requests_come_when_they_are_due_whether_the_engine_keeps_up_or_not() -> None:
    clock = FakeClock()
    engine = FakeEngine(clock)
    run = drive(engine, [request(0.5), request(0.0), request(7.0)], clock)
    assert engine.added == [(1, 0.0), (0, 1.0), (2, 7.0)]  # 0 came within the first step
    assert run["requests"][0] == {"arrival_s": 0.5, "tokens": [0, 0], "times": [2.0, 3.0]}
    assert run["requests"][1]["times"] == [1.0, 2.0]
    assert run["requests"][2]["times"] == [8.0, 9.0]
    assert clock.slept == [4.0]  # nothing ran between 3 and 7
    assert run["seconds"] == 9.0


def test_without_arrival_times_all_are_there_at_the_start() -> None:
    clock = FakeClock()
    engine = FakeEngine(clock)
    run = drive(engine, [request(None), request(None, max_new=1)], clock)
    assert engine.added == [(0, 0.0), (1, 0.0)]
    assert run["seconds"] == 2.0
    assert clock.slept == []


def test_a_wrong_number_of_tokens_is_an_error() -> None:
    clock = FakeClock()
    with pytest.raises(WrongAnswer, match=r"request 0 must get 2 tokens\. Got 3\."):
        drive(FakeEngine(clock, extra=1), [request(0.0)], clock)


def test_an_engine_that_ends_early_is_an_error_and_no_hang() -> None:
    clock = FakeClock()
    with pytest.raises(WrongAnswer, match=r"request 0 must get 5 tokens\. Got 4\."):
        drive(FakeEngine(clock, extra=-1), [request(0.0, max_new=5)], clock)


def test_the_real_clock_goes_on() -> None:
    clock = Clock()
    before = clock.now()
    clock.sleep(0.001)
    assert clock.now() > before


# ------------------------------------------------------------------------------------ the worker


def serve(monkeypatch: pytest.MonkeyPatch, module: Any, *messages: Any) -> list[Any]:
    monkeypatch.setitem(sys.modules, "scripts.peers.fake_one_peer", module)
    asked = io.StringIO("".join(json.dumps(message) + "\n" for message in messages))
    answers = io.StringIO()
    worker.serve("fake-one", asked, answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_a_worker_answers_each_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(settings: dict[str, Any]) -> FakeEngine:
        engine = FakeEngine(FakeClock(), seconds=0.0)
        engine.options = settings
        return engine

    module = types.SimpleNamespace(find=lambda: None, load=load)
    found, loaded, ran = serve(
        monkeypatch,
        module,
        {"do": "find"},
        {"do": "load", "settings": {"dtype": "float32"}},
        {"do": "run", "requests": [request(0.0, max_new=3)]},
    )
    assert found == {"ok": None}
    assert loaded == {"ok": {"version": "1", "options": {"dtype": "float32"}}}
    assert ran["ok"]["requests"][0]["tokens"] == [0, 0, 0]


def test_a_worker_says_what_failed_and_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find() -> None:
        raise ModuleNotFoundError("No module named 'x'")

    def load(settings: dict[str, Any]) -> FakeEngine:
        raise SystemExit("this library ends the program")

    module = types.SimpleNamespace(find=find, load=load)
    first, second = serve(monkeypatch, module, {"do": "find"}, {"do": "load", "settings": {}})
    assert first == {"error": "ModuleNotFoundError: No module named 'x'"}
    assert second == {"error": "SystemExit: this library ends the program"}
    assert "Traceback" in capsys.readouterr().err
