"""A log leads a fresh scheduler to the same decisions, and one that was altered is found out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from pagedjax import SamplingParams
from pagedjax.engine import LLMEngine
from pagedjax.errors import EventLogError
from pagedjax.events import EventLog
from pagedjax.replay import Difference, replay
from pagedjax.scheduler import Scheduler
from pagedjax.scheduling import pages_to_come
from tests.event_logs import write_trace
from tests.helpers import ByteTokenizer
from tests.tiny_engine import drain, tiny_llm


@given(
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from([1, 2, 4, 8]),
    spare_pages=st.integers(0, 8),
    caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    mode=st.sampled_from(["auto", "swap", "swap", "recompute"]),
    num_host_pages=st.sampled_from([0, 3, 20, 20]),
    operations=st.integers(1, 120),
    worth=st.sampled_from([4, 12, pages_to_come.WORTH_WAITING]),
)
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_random_traces_replay_to_the_same_decisions(
    tmp_path: Path,
    seed: int,
    page_size: int,
    spare_pages: int,
    caching: bool,
    policy: str,
    mode: str,
    num_host_pages: int,
    operations: int,
    worth: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages_to_come, "WORTH_WAITING", worth)
    write_trace(
        tmp_path / "log",
        seed,
        operations,
        page_size=page_size,
        num_pages=1 + 40 // page_size + spare_pages,
        enable_prefix_caching=caching,
        scheduling_policy=policy,
        preemption_mode=mode,
        num_host_pages=num_host_pages,
    )
    report = replay(tmp_path / "log")
    assert report.difference is None, str(report.difference)
    lines = documents(tmp_path / "log")
    assert report.num_lines == len(lines)
    assert report.num_steps == sum(line["e"] == "step" for line in lines)


def test_traces_with_swaps_and_lost_pages_replay_to_the_same_decisions(tmp_path: Path) -> None:
    seen, has_lost, has_not_run = set[str](), False, False
    for seed in range(12):
        write_trace(
            tmp_path / "log", seed, 250, num_pages=11, num_host_pages=20, preemption_mode="swap"
        )
        report = replay(tmp_path / "log")
        assert report.difference is None, str(report.difference)
        lines = documents(tmp_path / "log")
        seen |= {field for line in lines for field in line}
        has_lost |= any(line["e"] == "result" and line.get("lost") for line in lines)
        has_not_run |= any(line.get("arguments", {}).get("has_run") is False for line in lines)
    assert seen >= {"swaps_out", "swaps_in", "preempted"}
    assert has_lost
    assert has_not_run


def test_the_traces_hold_all_that_can_happen(tmp_path: Path) -> None:
    kinds, methods, fields = set[str](), set[str](), set[str]()
    for seed in range(25):
        write_trace(tmp_path / "log", seed)
        for document in documents(tmp_path / "log"):
            kinds.add(document["e"])
            methods.add(document.get("method", ""))
            fields.update(document)
    assert kinds >= {"added", "step", "stalled", "result", "dropped", "called", "restarted"}
    assert methods >= {"abort", "finish", "fail", "pin", "unpin", "reset_prefix_cache"}
    assert methods >= {"forget_device_pages", "schedule"}
    assert fields >= {"gone", "admitted", "preempted", "copies", "evicted", "waiting", "corrupted"}


# ------------------------------------------------------------------------------- altered decisions

ALTERED = {"pages", "runs", "preempted", "copies", "admitted", "evicted", "waiting", "gone"}


def documents(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rewrite(path: Path, changed: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(document) + "\n" for document in changed))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log with at least one of everything that is altered below."""
    for seed in itertools.count():
        write_trace(tmp_path / "log", seed)
        lines = documents(tmp_path / "log")
        fields = {field for line in lines for field in line}
        if fields >= ALTERED and {line["e"] for line in lines} >= {"restarted", "ended", "result"}:
            break
    assert replay(tmp_path / "log").difference is None
    return tmp_path / "log"


def alter_page(step: dict[str, Any]) -> None:
    step["pages"][0][2][0] += 1


def alter_run(step: dict[str, Any]) -> None:
    step["runs"][0][1] += 1


def alter_victim(step: dict[str, Any]) -> None:
    step["preempted"][0][3] += 1


def alter_copy(step: dict[str, Any]) -> None:
    step["copies"][0][2] += 1


def alter_hits(step: dict[str, Any]) -> None:
    step["admitted"][0][1] += 4


@pytest.mark.parametrize(
    ("kind", "needs", "alter", "what"),
    [
        ("step", "pages", alter_page, "`pages`"),
        ("step", "runs", alter_run, "`runs`"),
        ("step", "preempted", alter_victim, "`preempted`"),
        ("step", "copies", alter_copy, "`copies`"),
        ("step", "admitted", alter_hits, "`admitted`"),
        ("step", "evicted", lambda step: step["evicted"].pop(), "`evicted`"),
        ("step", "waiting", lambda step: step.update(waiting=[]), "`waiting`"),
        ("step", "gone", lambda step: step["gone"].pop(), "`gone`"),
        ("step", "free", lambda step: step.update(free=step["free"] + 1), "`free`"),
        ("step", "digest", lambda step: step.update(digest=step["digest"] ^ 1), "`digest`"),
        ("ended", "reason", lambda ended: ended.update(reason="other"), "`reason`"),
        ("ended", "tokens", lambda ended: ended.update(tokens=99), "`tokens`"),
        ("restarted", "sequence", lambda one: one.update(sequence="99"), "`sequence`"),
    ],
)
def test_an_altered_decision_is_found(
    log: Path, kind: str, needs: str, alter: Callable[[dict[str, Any]], Any], what: str
) -> None:
    lines = documents(log)
    at = next(i for i, line in enumerate(lines) if line["e"] == kind and line.get(needs))
    steps = [line["step"] for line in lines[:at] if line["e"] == "step"]
    alter(lines[at])
    rewrite(log, lines)
    difference = replay(log).difference
    assert difference is not None
    assert difference.what == what
    assert difference.line == at + 1
    assert difference.step == (lines[at]["step"] if kind == "step" else max(steps))
    assert difference.logged != difference.replayed
    assert f"line {at + 1}, step {difference.step}: {what} differs\n" in str(difference)


@pytest.mark.parametrize("kind", ["step", "ended", "restarted"])
def test_a_decision_that_is_missing_or_made_up_is_found(log: Path, kind: str) -> None:
    lines = documents(log)
    at = next(i for i, line in enumerate(lines) if line["e"] == kind)
    rewrite(log, lines[:at] + lines[at + 1 :])
    with_one_less = replay_or_damage(log)
    rewrite(log, [*lines[: at + 1], lines[at], *lines[at + 1 :]])
    with_one_more = replay(log).difference
    assert with_one_less
    assert with_one_more is not None
    assert with_one_more.line == at + 2


def replay_or_damage(path: Path) -> bool:
    """Whether a difference or damage is reported: a result may come of a step that is missing."""
    try:
        return replay(path).difference is not None
    except EventLogError:
        return True


def test_another_token_leads_to_another_digest(log: Path) -> None:
    lines = documents(log)
    last = max(i for i, line in enumerate(lines) if line["e"] == "step")
    results = [i for i, line in enumerate(lines[:last]) if line.get("tokens") and "step" in line]
    differences: list[Difference | None] = []
    for at in results:  # not each is ever looked at: some are of requests that were aborted
        altered = [dict(line) for line in lines]
        altered[at]["tokens"] = [*lines[at]["tokens"][:-1], lines[at]["tokens"][-1] ^ 1]
        rewrite(log, altered)
        differences.append(replay(log).difference)
        assert differences[-1] is None or differences[-1].line > at + 1
    assert sum(difference is not None for difference in differences) > len(results) / 4


def test_another_configuration_is_found(log: Path) -> None:
    lines = documents(log)
    lines[0]["config"]["num_pages"] += 1
    rewrite(log, lines)
    difference = replay(log).difference
    assert difference is not None
    assert difference.what == "`free`"


def test_a_log_may_end_anywhere(log: Path) -> None:
    data = log.read_bytes()
    first = data.index(b"\n") + 1
    for size in range(first, len(data), 997):
        log.write_bytes(data[:size])
        report = replay(log)
        assert report.difference is None
        whole = data[:size].count(b"\n")
        assert report.num_lines in (whole, whole + 1)  # a line may lack nothing but its end


# --------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ({"e": "added", "request": {}}, "KeyError"),
        ({"e": "added", "request": {"params": {}, "colour": 1}}, "TypeError"),
        ({"e": "result", "step": 9999}, "KeyError"),
        ({"e": "dropped", "step": 9999}, "KeyError"),
        ({"e": "called", "method": "__init__"}, "no method that can be replayed"),
        ({"e": "called", "method": "abort", "arguments": {"x": 1}}, "TypeError"),
        ({"e": "called", "method": "finish", "arguments": {"sequence": "x"}}, "KeyError"),
        ({"e": "called", "method": "fail", "arguments": {"reason": "x"}}, "ValueError"),
        ({"e": "what"}, "is no kind of event"),
    ],
)
def test_a_damaged_line_is_told_with_its_number(
    log: Path, line: dict[str, Any], complaint: str
) -> None:
    lines = documents(log)
    # Before the first line that no decision has to follow at once.
    at = next(i for i, one in enumerate(lines) if i and one["e"] == "added")
    rewrite(log, [*lines[:at], line, *lines[at:]])
    with pytest.raises(EventLogError, match=f"line {at + 1} is damaged: .*{complaint}"):
        replay(log)


def test_a_result_that_does_not_fit_its_step_is_damage(log: Path) -> None:
    lines = documents(log)
    at = next(i for i, line in enumerate(lines) if line["e"] == "result")
    lines[at]["tokens"] = [1] * 99
    rewrite(log, lines)
    with pytest.raises(EventLogError, match=f"line {at + 1} is damaged"):
        replay(log)


def test_options_that_are_unknown_here_are_refused(log: Path) -> None:
    lines = documents(log)
    lines[0]["config"]["new_option"] = 1
    lines[0]["version"] = "9.9"
    rewrite(log, lines)
    with pytest.raises(EventLogError, match=r"configuration .* pagedjax 9\.9: .*new_option"):
        replay(log)


def test_a_request_that_is_refused_here_is_a_difference(log: Path) -> None:
    lines = documents(log)
    at = next(i for i, line in enumerate(lines) if line["e"] == "added")
    lines[at]["request"]["prompt_token_ids"] = [1] * 1000
    rewrite(log, lines)
    difference = replay(log).difference
    assert difference is not None
    assert "max_model_len" in str(difference.replayed)


# ------------------------------------------------------------------------------------- an engine


def test_what_an_engine_did_with_a_model_is_replayed(tmp_path: Path) -> None:
    """Text, stop strings, samples, timeouts and aborts, on a pool that is too small for them."""
    shared, path, clock = tiny_llm(4).engine, tmp_path / "log", itertools.count()
    log = EventLog(path)
    engine = LLMEngine(
        Scheduler(shared.scheduler.config, events=log),
        shared.runner,
        ByteTokenizer(),
        clock=lambda: float(next(clock)),
    )
    for i in range(12):
        params = SamplingParams(max_tokens=60, n=1 + i % 3, stop=("e",) if i % 2 else ())
        engine.add_request(
            str(i), "the same beginning " * (1 + i % 2) + str(i), params, timeout=150.0 + i
        )
    engine.step()
    engine.abort("3")
    outputs = drain(engine)
    assert len(outputs) == 12
    assert {type(output.error).__name__ for output in outputs.values()} == {
        "NoneType",
        "RequestError",
    }
    report = replay(path)  # not closed: an engine without work has written all
    assert report.difference is None, str(report.difference)
    assert report.num_steps > 20
    log.close()
