"""The event log on its own: what is written is read again, and trouble with files stays there."""

from __future__ import annotations

import gc
import json
import logging
import stat
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagedjax.config import SchedulerConfig
from pagedjax.errors import ConfigError, EventLogError
from pagedjax.events import (
    KINDS,
    SCHEMA,
    Added,
    Called,
    Costs,
    Dropped,
    Ended,
    EventLog,
    Header,
    Restarted,
    Result,
    Stalled,
    Step,
    Turned,
    decode,
    decode_request,
    encode,
    encode_request,
    read_events,
    salt_digest,
)
from pagedjax.request import Request, SamplingParams
from pagedjax.scheduler import Scheduler
from pagedjax.scheduling import recorder
from pagedjax.scheduling.draft import Blocked
from tests.event_logs import Events, Trace
from tests.test_scheduler import Bench

HEADER = Header(schema=SCHEMA, version="1", config={"page_size": 4})
EXAMPLES = [
    HEADER,
    Added(request={"request_id": "é\ud800", "params": {}}),
    Costs(rates={"seconds_per_token": 0.1}),
    Step(step=3, runs=[["1", 2]], preempted=[["1", "swap", "0", 1, 0]], free=0, digest=7),
    Stalled(waiting=["2", "pages", 1, 0, 0]),
    Result(step=3, tokens=[1, 2], corrupted=[1], candidates=[[0, [1, 2], [-0.5, -1.5]]]),
    Dropped(step=3, arguments={"lost": [1]}),
    Called(method="abort", arguments={"request_id": "a"}),
    Restarted(sequence="1"),
    Turned(moves=[["1", "1.2", True]]),
    Ended(sequence="1.2", reason="error", tokens=0, error="bad"),
]  # fmt: skip


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def write(path: Path, *lines: str | bytes) -> Path:
    raw = [line.encode() if isinstance(line, str) else line for line in lines]
    path.write_bytes(b"".join(raw))
    return path


def request(**changes: Any) -> Request:
    values: dict[str, Any] = {
        "request_id": "a",
        "prompt_token_ids": (1, 2, 3),
        "params": SamplingParams(),
        "arrival": 5,
        "seed": 2**64 - 1,
    }
    return Request(**(values | changes))


# ---------------------------------------------------------------------------------- on the disk


def test_there_is_an_example_of_every_kind() -> None:
    assert [type(event) for event in EXAMPLES] == list(KINDS.values())


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: type(event).__name__)
def test_an_event_is_read_as_it_was_written(event: Any) -> None:
    line = encode(event, 1.5)
    assert "\n" not in line
    assert line.isascii()
    assert decode(line) == (event, 1.5)


def test_what_says_nothing_is_left_out() -> None:
    assert encode(Step(step=9, free=3, digest=1)) == '{"e":"step","step":9,"free":3,"digest":1}'


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "Expecting"),
        ("[]", "must be an object"),
        ('{"e":"stop"}', "'stop' is no kind"),
        ('{"e":[]}', "no kind"),
        ('{"e":"ended","sequence":"1","reason":"x"}', r"no \['tokens'\]"),
        ('{"e":"restarted","sequence":"1","more":1}', r"no \['more'\]"),
        ('{"e":"restarted","sequence":1}', "`sequence` must be str"),
        ('{"e":"ended","sequence":"1","reason":"x","tokens":true}', "`tokens` must be int"),
        ('{"e":"stalled","waiting":{}}', "`waiting` must be list"),
        ('{"e":"restarted","sequence":"1","t":"now"}', "`t` must be a number"),
    ],
)
def test_a_damaged_line_is_told_with_its_number(tmp_path: Path, line: str, complaint: str) -> None:
    path = write(tmp_path / "log", encode(HEADER), "\n", encode(EXAMPLES[1]), "\n", line, "\n")
    with pytest.raises(EventLogError, match=f"log, line 3 is damaged: .*{complaint}"):
        list(read_events(path))


@pytest.mark.parametrize("torn", ["{", '{"e":"restarted","sequence', "\x00\x00", b"\xff"])
def test_a_torn_last_line_is_ignored(tmp_path: Path, torn: str | bytes) -> None:
    path = write(tmp_path / "log", encode(HEADER), "\n", encode(EXAMPLES[1]), "\n", torn)
    assert [logged.event for logged in read_events(path)] == EXAMPLES[:2]


def test_a_last_line_that_lacks_its_end_only_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "log", encode(HEADER), "\n", encode(EXAMPLES[1]))
    assert [logged.line for logged in read_events(path)] == [1, 2]


def test_time_stamps_hold_until_the_next(tmp_path: Path) -> None:
    lines = [encode(HEADER, 0.0), encode(EXAMPLES[1], 1.5), encode(EXAMPLES[1])]
    path = write(tmp_path / "log", *(line + "\n" for line in lines))
    assert [logged.seconds for logged in read_events(path)] == [0.0, 1.5, 1.5]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "empty file"),
        ("not a log\n", "its first line is no header"),
        (encode(EXAMPLES[1]) + "\n", "its first line is no header"),
        ('{"e":"header","schema":99,"version":"7.0","new":1}\n', "schema 1. Got 99.*pagedjax 7.0"),
        (2 * (encode(HEADER) + "\n"), "line 2 is damaged: it is a second header"),
        ('{"e":"header","schema":1}\n', "line 1 is damaged: no "),
    ],
)
def test_what_is_no_log_of_this_schema_is_refused(
    tmp_path: Path, content: str, complaint: str
) -> None:
    with pytest.raises(EventLogError, match=complaint):
        list(read_events(write(tmp_path / "log", content)))


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(EventLogError, match=r"cannot read the event log .*none: No such file"):
        list(read_events(tmp_path / "none"))


# ------------------------------------------------------------------------------------- requests


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"params": SamplingParams(n=3, temperature=0.5, logit_bias={4: -2.5}, stop=("x", "y"))},
        {"params": SamplingParams(allowed_token_ids=(1, 2), bad_token_ids=(3,), logprobs=0)},
        {"params": SamplingParams(beam_width=3, n=2, length_penalty=0.5, temperature=0.0)},
        {"params": SamplingParams(max_tokens=None, min_tokens=4, seed=-3, prompt_logprobs=2)},
        {"eos_token_ids": frozenset({7, 2}), "bad_sequences": ((1, 2), (3,))},
        {"priority": -4, "arrival_time": 12.25, "timeout": 3.0},
    ],
)
def test_a_request_is_made_again_from_its_event(changes: dict[str, Any]) -> None:
    original = request(**changes)
    document = json.loads(json.dumps(encode_request(original)))
    assert decode_request(document) == original


def test_a_log_holds_neither_the_text_nor_the_salt_of_a_request() -> None:
    original = request(prompt="my secret", cache_salt="my salt")
    text = json.dumps(encode_request(original))
    assert "secret" not in text
    assert "my salt" not in text
    again = decode_request(json.loads(text))
    assert again == replace(original, prompt=None, cache_salt=salt_digest("my salt"))
    assert salt_digest("my salt") != salt_digest("my salt2")
    assert salt_digest(None) is None


# ---------------------------------------------------------------------------------- the writer


def test_lines_are_kept_back_for_a_second_at_most(tmp_path: Path) -> None:
    clock = Clock()
    log = EventLog(tmp_path / "log", clock)
    log.emit(HEADER)
    clock.now += 0.9
    log.emit(EXAMPLES[1])
    assert (tmp_path / "log").read_text() == ""
    clock.now += 0.1
    log.emit(EXAMPLES[1])
    assert [logged.seconds for logged in read_events(tmp_path / "log")] == [0.0, 0.9, 1.0]
    log.emit(EXAMPLES[2])
    log.flush()
    assert len(list(read_events(tmp_path / "log"))) == 4
    log.close()


def test_many_lines_are_written_at_once(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log", Clock())
    for event in [HEADER, *EXAMPLES[1:2] * 511]:
        assert (tmp_path / "log").read_text() == ""
        log.emit(event)
    assert len(list(read_events(tmp_path / "log"))) == 512
    log.close()


def test_what_was_kept_back_is_written_at_the_end(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log")
    log.emit(HEADER)
    log.close()
    log.close()
    log.emit(EXAMPLES[1])
    log.flush()
    assert len(list(read_events(tmp_path / "log"))) == 1
    forgotten = EventLog(tmp_path / "forgotten")
    forgotten.emit(HEADER)
    del forgotten
    gc.collect()
    assert len(list(read_events(tmp_path / "forgotten"))) == 1


def test_a_file_is_emptied_by_the_first_event_and_not_before(tmp_path: Path) -> None:
    path = write(tmp_path / "log", "old\n" * 1000)
    log = EventLog(path)
    assert path.read_text() == "old\n" * 1000
    log.emit(HEADER)
    log.close()
    assert len(list(read_events(path))) == 1


def test_a_log_is_for_its_owner_only(tmp_path: Path) -> None:
    EventLog(tmp_path / "log").close()
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600


def test_a_log_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`event_log` must be a file that can be written"):
        EventLog(tmp_path / "no" / "log")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_ends_the_log_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog("/dev/full")
    trace = Trace(0, log)
    log.flush()
    trace.run(60)
    log.flush()
    log.close()
    assert trace.scheduler.stats.num_requests > 3
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    texts = [record.getMessage() for record in warnings if "event log" in record.getMessage()]
    assert texts == ["the event log /dev/full ends here: No space left on device"]


# ------------------------------------------------------------------------------------ recording


def recorded(**sizes: Any) -> tuple[Bench, Events]:
    """A bench whose scheduler is recorded."""
    events = Events()
    bench = Bench(**sizes)
    bench.scheduler = Scheduler(bench.config, events=events)
    bench.runner = type(bench.runner)(bench.config, bench.scheduler.allocator)
    return bench, events


def test_nothing_is_recorded_unless_asked_for() -> None:
    bench = Bench()
    assert bench.scheduler.events is None
    assert bench.scheduler.roster.events is None


def test_the_header_has_the_whole_configuration() -> None:
    bench, events = recorded(max_num_seqs=3)
    header = events.events[0]
    assert isinstance(header, Header)
    assert header.schema == SCHEMA
    assert SchedulerConfig(**header.config) == bench.config
    assert set(header.config) == {item.name for item in fields(SchedulerConfig)}


def test_a_step_that_goes_on_decoding_names_nobody() -> None:
    bench, events = recorded(page_size=16, num_pages=33)
    requests = [bench.add(5) for _ in range(4)]
    bench.step(4)
    steps = events.of(Step)
    assert sorted(name for name, _ in steps[0].runs) == ["0", "1", "2", "3"]
    for step in steps[1:]:
        quiet = Step(step=step.step, free=step.free, digest=step.digest)
        assert step == quiet
    assert len(encode(steps[-1])) < 60
    bench.finish_all(*requests)


def test_only_who_comes_and_goes_is_named() -> None:
    bench, events = recorded(page_size=16, num_pages=33)
    first, second = bench.add(5, max_tokens=20), bench.add(5, max_tokens=2)
    bench.step(2)  # the second ends
    third = bench.add(3, max_tokens=20)
    bench.step(2)
    step = events.of(Step)[2]
    assert step.gone == ["1"]
    assert step.runs == [["2", 3]]
    assert step.admitted == [["2", 0, []]]
    assert step.pages == [["2", 0, [2]]]
    assert events.of(Ended)[0] == Ended(sequence="1", reason="length", tokens=2)
    bench.finish_all(first, second, third)


@pytest.mark.parametrize(
    ("sizes", "prompts", "waiting"),
    [
        ({"max_num_seqs": 1}, [5, 6], ["1", "slots", 1, 0, 0]),
        ({"max_num_batched_tokens": 8}, [8, 6], ["1", "tokens", 1, 0, 0]),
        ({"num_pages": 20, "max_model_len": 72}, [44, 30], ["1", "pages", 8, 8, 1]),
    ],
)
def test_the_head_of_the_queue_is_told_why_it_waits(
    sizes: dict[str, Any], prompts: list[int], waiting: list[Any]
) -> None:
    bench, events = recorded(**({"max_num_batched_tokens": 64} | sizes))
    requests = [bench.add(prompt) for prompt in prompts]
    bench.step()
    assert events.of(Step)[0].waiting == waiting
    bench.step(2)
    if waiting[1] != "tokens":
        assert [step.waiting for step in events.of(Step)[1:]] == [[], []], "it was said already"
    bench.finish_all(*requests)


def test_a_sample_that_will_fork_keeps_its_slots() -> None:
    bench, events = recorded(max_num_batched_tokens=8)
    forking, late = bench.add(12, n=3), bench.add(4, n=2)
    bench.step()
    assert events.of(Step)[0].waiting == ["1", "slots", 2, 3, 2]
    bench.finish_all(forking, late)


def test_who_gives_way_is_told_for_whom() -> None:
    bench, events = recorded(page_size=4, num_pages=11, max_model_len=40)
    requests = [bench.add(14, max_tokens=12), bench.add(14, max_tokens=12)]
    bench.finish_all(*requests)
    preempted = [item for step in events.of(Step) for item in step.preempted]
    assert preempted[0] == ["1", "recompute", "0", 1, 0]
    assert events.of(Restarted) == [], "a victim is told once, by its step"
    assert bench.scheduler.stats.num_preemptions == len(preempted)
    steps = events.of(Step)
    at = next(i for i, step in enumerate(steps) if step.preempted)
    assert steps[at].waiting == [], "the queue was empty when it was looked at"
    assert steps[at + 1].waiting[:2] == ["1", "pages"]


def test_nobody_is_admitted_while_others_give_way() -> None:
    bench, events = recorded(page_size=4, num_pages=11, max_model_len=40)
    requests = [bench.add(14, max_tokens=12), bench.add(14, max_tokens=12)]
    bench.step()
    requests.append(bench.add(16))
    bench.finish_all(*requests)
    step = next(step for step in events.of(Step) if step.preempted)
    assert step.waiting == ["2", "preempting", 1, 0, 0]


def test_pages_that_are_given_up_and_copied_are_told() -> None:
    bench, events = recorded(page_size=4, num_pages=17)
    bench.finish_all(bench.add(9, n=2, max_tokens=3))
    copies = [item for step in events.of(Step) for item in step.copies]
    assert len(copies) == bench.scheduler.stats.num_cow_copies == 1
    assert copies[0][0] in ("0", "0.1")
    bench.finish_all(bench.add(60, max_tokens=1))
    evicted = [page for step in events.of(Step) for page in step.evicted]
    assert evicted == [2], "of two cached pages the later one; 15 of 16 are needed"


def test_a_recorder_that_breaks_falls_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench, events = recorded()
    requests = [bench.add(5)]
    monkeypatch.setattr(recorder, "digest", lambda plan: 1 // 0)
    bench.finish_all(*requests)
    assert events.of(Step) == events.of(Ended) == []
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["the event log ends here: recording failed"]


def test_a_stall_without_news_leaves_no_trace() -> None:
    """It has no line, so a replay does not see it: what was said before it is still said."""
    sink = Events()
    scheduler = Scheduler(Trace(0, sink).config, events=sink)
    live = next(iter(scheduler.roster.live[one] for one in scheduler.add_request(request())))
    blocked = SimpleNamespace(blocked=Blocked(live, "slots", 1))
    assert scheduler.events is not None
    for draft in (blocked, SimpleNamespace(blocked=None), blocked):
        scheduler.events.stalled(cast(Any, draft))
    assert [event.waiting for event in sink.of(Stalled)] == [["5", "slots", 1, 0, 0]]
