"""Lines in and lines out: order, ids, errors of one line, bounds; with a model that is a fake."""

from __future__ import annotations

import io
import json
import logging
import tracemalloc
from collections.abc import Iterable
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from pagedjax.batch_job import Summary, answers, run_batch
from pagedjax.batch_job import job as job_module
from pagedjax.batch_job.answers import AsFinished, InputOrder
from pagedjax.batch_job.lines import MAX_LINE_BYTES, read_lines
from pagedjax.openai_api.requests import (
    HARMLESS,
    OWN,
    OWN_OF,
    SAMPLING,
    UNSUPPORTED,
    UNSUPPORTED_OF,
    Endpoint,
)
from tests.batch_fakes import FakeLLM

type Row = dict[str, Any]


def line(prompt: Any, custom_id: str | None = None, **body: Any) -> bytes:
    """A line in the short form."""
    named = {} if custom_id is None else {"custom_id": custom_id}
    return json.dumps({"prompt": prompt, **body, **named}).encode() + b"\n"


def batch(custom_id: Any, url: str = "/v1/completions", **body: Any) -> bytes:
    """A line in OpenAI's form."""
    document = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return json.dumps(document).encode() + b"\n"


def run(
    lines: Iterable[bytes], llm: FakeLLM | None = None, **how: Any
) -> tuple[list[Row], Summary]:
    written: list[str] = []
    summary = run_batch(llm or FakeLLM(), lines, InputOrder(written.append), **how)
    assert all(text.endswith("\n") and text.count("\n") == 1 for text in written)
    return [json.loads(text) for text in written], summary


def error_of(row: Row) -> Row:
    """The error of an error line, whose two places must agree."""
    inner = row["response"]["body"]["error"]
    assert row["error"]["code"] == inner["code"]
    assert row["error"]["message"].endswith(": " + inner["message"])
    return {**inner, **row["error"], "status": row["response"]["status_code"]}


def text_of(row: Row) -> str:
    assert row["error"] is None
    assert row["response"]["status_code"] == 200
    return row["response"]["body"]["choices"][0]["text"]


# --------------------------------------------------------------------------------------- answers


def test_answers_have_openai_s_form() -> None:
    (row,), summary = run([batch("a", prompt="abc")])
    assert list(row) == ["id", "custom_id", "response", "error"]
    assert row["custom_id"] == "a"
    assert row["id"].startswith("batch_req_")
    assert row["response"]["request_id"].startswith("req_")
    assert text_of(row) == "ABC"
    assert (summary.answered, summary.failed) == (1, 0)
    assert (summary.prompt_tokens, summary.output_tokens) == (3, 3)
    body = row["response"]["body"]
    # Nothing that depends on when it ran, or on what ran before: runs that were cut give the same.
    assert body["created"] == 0
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}


def test_the_event_log_knows_prompts_by_their_lines() -> None:
    llm = FakeLLM()
    run([batch("a", prompt="abc"), batch("b", prompt=["de", "f"]), line("g")], llm)
    assert list(llm.engine.labels.values()) == ["a", "b[0]", "b[1]", "line-3"]


def test_chats_are_encoded_by_the_model() -> None:
    messages = [{"role": "user", "content": "hi"}]
    rows, _ = run([
        batch("a", "/v1/chat/completions", messages=messages),
        json.dumps({"messages": messages, "max_tokens": 1}).encode(),
    ])  # fmt: skip
    contents = [row["response"]["body"]["choices"][0]["message"]["content"] for row in rows]
    assert contents == ["HI", "H"]


def test_output_is_in_the_order_of_the_input() -> None:
    rows, _ = run([line("abcdef"), line("ab"), b"bad", line("abcd"), line("a")])
    assert [row["custom_id"] for row in rows] == ["line-1", "line-2", None, "line-4", "line-5"]
    assert [text_of(row) for row in rows if row["custom_id"]] == ["ABCDEF", "AB", "ABCD", "A"]


def test_output_may_be_in_the_order_of_finishing() -> None:
    written: list[str] = []
    run_batch(FakeLLM(), [line("abcdef"), line("ab"), b"bad"], AsFinished(written.append))
    assert [json.loads(text)["custom_id"] for text in written] == [None, "line-2", "line-1"]


def test_long_answer_does_not_stop_the_lines_behind_it() -> None:
    llm = FakeLLM()
    rows, _ = run([line("a" * 60, max_tokens=60), *[line("b") for _ in range(20)]], llm,
                  max_in_flight=2)  # fmt: skip
    assert len(rows) == 21
    assert len(llm.engine.added) == 21
    assert llm.engine.most_sequences == 2


def test_answers_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_WAITING_CHARS", 2000)
    taken = []

    def lines() -> Iterable[bytes]:
        yield line("a" * 60, max_tokens=60)
        for number in range(50):
            taken.append(number)
            yield line("b")

    seen = []
    rows, _ = run(lines(), max_in_flight=2, on_progress=lambda _: seen.append(len(taken)))
    assert len(rows) == 51
    assert seen[58] < 10, "while the first line runs, the rest of the input waits"


def test_input_is_read_as_the_engine_has_room() -> None:
    llm = FakeLLM()

    def lines() -> Iterable[bytes]:
        for number in range(40):
            assert len(llm.engine.running) < 4
            yield line("abc" + str(number % 7))

    rows, summary = run(lines(), llm, max_in_flight=4)
    assert len(rows) == summary.answered == 40


def test_memory_does_not_grow_with_the_input() -> None:
    count, size = 5_000, 2_000
    lines = (b'{"prompt": "ab", "user": "%s"}' % (b"x" * size) for _ in range(count))
    llm = FakeLLM()
    monitor = llm.engine.added  # the fake remembers what it was given
    tracemalloc.start()
    try:
        run_batch(
            llm, lines, AsFinished(lambda text: None), max_in_flight=4,
            on_progress=lambda _: monitor.clear(),
        )  # fmt: skip
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 400 * count + 100 * size, "a hash for each line, and some lines"


def test_samples_count_as_sequences_in_flight() -> None:
    llm = FakeLLM()
    rows, _ = run([line("ab", n=3) for _ in range(6)], llm, max_in_flight=5)
    assert llm.engine.most_sequences == 6  # 3 < 5, so one more line was let in
    assert all(len(row["response"]["body"]["choices"]) == 3 for row in rows)


def test_prompts_of_one_line_are_answered_together() -> None:
    (first, second), _ = run([line(["abc", "a", "ab"], n=2), line("z")])
    choices = first["response"]["body"]["choices"]
    assert [choice["text"] for choice in choices] == ["ABC", "ABC", "A", "A", "AB", "AB"]
    assert text_of(second) == "Z"


def test_model_defaults_hold_for_what_a_line_leaves_out() -> None:
    llm = FakeLLM(default_params={"temperature": 0.25, "top_k": 5})
    run([line("a", "x"), line("a", "y", temperature=0)], llm)
    first, second = (params for _, params, _ in llm.engine.added.values())
    assert (first.temperature, first.top_k) == (0.25, 5)
    assert second.temperature == 0.0


def test_cache_salt_reaches_the_engine() -> None:
    llm = FakeLLM()
    run([line("a", cache_salt="s")], llm)
    assert [salt for _, _, salt in llm.engine.added.values()] == ["s"]


def test_request_ids_depend_on_the_custom_id_alone() -> None:
    """So do the draws of a request without a seed: the engine derives its seed from this id."""
    one, other = FakeLLM(), FakeLLM()
    rows, _ = run([line("a", "x"), line("b", "y")], one)
    swapped, _ = run([b"\n", line("b", "y"), b"bad", line("a", "x")], other)
    assert set(one.engine.added) == set(other.engine.added)
    assert {row["custom_id"]: row["id"] for row in rows}.items() <= {
        row["custom_id"]: row["id"] for row in swapped
    }.items()


def test_unusual_text_stays_one_line_of_utf8() -> None:
    raw: list[str] = []
    prompts = ["안녕", "a\u2028b\x85c", "tab\t\n", "\N{GRINNING FACE}"]
    run_batch(FakeLLM(), [line(prompt) for prompt in prompts], InputOrder(raw.append))
    shown = "".join(raw)
    assert "안녕" in shown
    assert len(shown.splitlines()) == 4, "no reader sees a line end inside a line"
    texts = [text_of(json.loads(text)) for text in shown.splitlines()]
    assert texts == [prompt.swapcase() for prompt in prompts]


# ------------------------------------------------------------------------------- one line's errors

DEEP = b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}"
VERY_DEEP = b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"

BAD_LINES: list[tuple[bytes, str, str]] = [
    (b"hello", "invalid_json", "must be one JSON object. Got Expecting value at character 1"),
    (b'{"prompt": "a"} {"prompt": "b"}', "invalid_json", "Extra data at character 17"),
    (b'{"prompt": "a"', "invalid_json", "must be one JSON object"),
    (b"[1, 2]", "invalid_json", "must be a JSON object. Got a list"),
    (b'"text"', "invalid_json", "must be a JSON object. Got a string"),
    (b"12", "invalid_json", "must be a JSON object. Got a number"),
    (b"null", "invalid_json", "must be a JSON object. Got null"),
    (b'{"prompt": "a\x00b"}', "invalid_json", "Invalid control character"),
    (b"\x00\x00\x00", "invalid_json", "must be one JSON object"),
    (b'{"prompt": "\xff"}', "invalid_json", "must be UTF-8 text. Byte 13 is 0xff"),
    (b'\xff\xfe{\x00"\x00', "invalid_json", "must be UTF-8 text. Byte 1 is 0xff"),
    (b'{"prompt": "a", "temperature": NaN}', "invalid_json", "JSON, which has no NaN"),
    (b'{"prompt": "a", "top_p": -Infinity}', "invalid_json", "JSON, which has no -Infinity"),
    (b'{"prompt": "a", "temperature": 1e999}', "invalid_value", "must be a finite number"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "invalid_json", "must have fewer digits"),
    (b'{"prompt": "a", "seed": ' + b"9" * 4000 + b"}", "invalid_value", "`seed` must be"),
    (DEEP, "invalid_json", "must not nest lists and objects deeper than 64"),
    (VERY_DEEP, "invalid_json", "must not nest lists and objects deeper than 64"),
    (b'{"prompt": "a", "prompt": "b"}', "invalid_json", "`prompt` must be given once"),
    (b'{"prompt": "\\ud800"}', "invalid_json", "must be valid Unicode"),
    (b"{}", "invalid_value", "or `prompt`, or `messages`. Got none of them"),
    (b'{"prompt": "a", "messages": []}', "invalid_value", "Got `prompt` and `messages`"),
    (b'{"custom_id": 5, "prompt": "a"}', "invalid_value", "`custom_id` must be a string"),
    (b'{"custom_id": "", "prompt": "a"}', "invalid_value", "`custom_id` must be a string"),
    (line("a", "x" * 513), "invalid_value", "string of 1 to 512 characters"),
    (batch(None, prompt="a"), "invalid_value", "`custom_id` must be a string"),
    (batch("u", "/v1/embeddings", prompt="a"), "invalid_url", "`url` must be /v1/completions or"),
    (b'{"custom_id": "m", "url": "/v1/completions", "body": {}}', "invalid_value", 'be "POST"'),
    (
        b'{"custom_id": "f", "method": "POST", "url": ["/v1/completions"], "body": {}}',
        "invalid_url",
        "`url` must be",
    ),
    (
        b'{"custom_id": "b", "method": "POST", "url": "/v1/completions"}',
        "invalid_value",
        "`body` must be an object. Got nothing",
    ),
    (
        b'{"custom_id": "t", "method": "POST", "url": "/v1/completions", "body": {}, "n": 2}',
        "unknown_parameter",
        "`n` is not a field of a batch request",
    ),
    (line("a", "p1", temprature=0), "unknown_parameter", "`temprature` is not a parameter"),
    (line("a", "p2", stream=True), "unsupported_parameter", "`stream` is not supported here"),
    (line("a", "p3", n=10**9), "invalid_value", "`n` must be an integer in [1, 128]"),
    (line("", "p4"), "invalid_value", "`prompt` must not be empty"),
    (line("a" * 64, "p5"), "context_length_exceeded", "at most 63 tokens. Got 64"),
    (b'{"messages": "hi"}', "invalid_value", "`messages` must be a list"),
    (
        batch("p6", "/v1/chat/completions", messages=[{"content": "hi"}], tools=[{"type": "f"}]),
        "unsupported_parameter",
        "`tools` is not supported here",
    ),
]


@pytest.mark.parametrize(("bad", "code", "message"), BAD_LINES)
def test_bad_line_fails_alone_and_by_its_number(bad: bytes, code: str, message: str) -> None:
    rows, summary = run([line("ab", "before"), b"\n", bad, line("cd", "after")])
    assert [text_of(rows[0]), text_of(rows[2])] == ["AB", "CD"]
    error = error_of(rows[1])
    assert error["status"] == 400
    assert error["type"] == "invalid_request_error"
    assert error["code"] == code
    assert error["message"].startswith("line 3: ")
    assert message in error["message"]
    assert len(error["message"]) < 400
    assert (summary.answered, summary.failed) == (2, 1)


NAMES = sorted(
    SAMPLING | OWN | HARMLESS | OWN_OF[Endpoint.COMPLETIONS] | OWN_OF[Endpoint.CHAT] | {"custom_id"}
    | set(UNSUPPORTED) | set(UNSUPPORTED_OF[Endpoint.CHAT]) | {"method", "url", "body", "other"}
)  # fmt: skip
ODD: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 2**31, 2**64, -(10**40), 0.5, -0.0, 1e300, "", "0", "POST",
    [], [0], [[1]], [None], ["a"], ["", "b"], {}, {"0": 1}, {"a": []}, {"role": "user"}, "\x00",
]  # fmt: skip


@hypothesis.given(
    st.sampled_from(["prompt", "messages"]),
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(ODD)),
)
def test_no_value_of_any_parameter_is_more_than_a_bad_request(kind: str, body: Row) -> None:
    """Whatever a line holds, it is answered or refused: it never reaches a bug of ours."""
    first = "a" if kind == "prompt" else [{"role": "user", "content": "a"}]
    rows, _ = run([json.dumps({kind: first, **body}).encode(), line("ab")])
    assert rows[0]["response"]["status_code"] in (200, 400), rows[0]["error"]
    assert text_of(rows[1]) == "AB"


@hypothesis.given(st.binary(max_size=40), st.sampled_from([b"", b'{"prompt": "a", "n": ', b"["]))
def test_no_bytes_are_more_than_a_bad_line(noise: bytes, start: bytes) -> None:
    raw = (start + noise).replace(b"\n", b"")
    rows, summary = run([raw, line("ab", "x")])
    assert text_of(rows[-1]) == "AB"
    assert summary.num_lines == 2
    assert all(row["response"]["status_code"] in (200, 400) for row in rows)


def test_error_lines_keep_the_custom_id_and_name_the_parameter() -> None:
    rows, _ = run([batch("mine", prompt="a", temperature=-1), b"bad"])
    assert rows[0]["custom_id"] == "mine"
    assert error_of(rows[0])["param"] == "temperature"
    assert rows[1]["custom_id"] is None
    assert error_of(rows[1])["param"] is None
    assert rows[0]["id"] != rows[1]["id"]


def test_line_that_is_too_long_is_cut_while_it_is_read() -> None:
    long = b'{"prompt": "' + b"a" * MAX_LINE_BYTES + b'"}\n'
    fitting = line("ab", "x")[:-1]
    fitting += b" " * (MAX_LINE_BYTES - len(fitting)) + b"\n"
    pieces = list(read_lines(io.BytesIO(long + fitting + line("cd")[:-1])))
    assert [len(piece) for piece in pieces[:2]] == [MAX_LINE_BYTES + 1] * 2
    rows, _ = run(pieces)
    assert error_of(rows[0])["code"] == "line_too_long"
    assert [text_of(row) for row in rows[1:]] == ["AB", "CD"]


def test_ten_megabytes_in_one_line_are_read() -> None:
    rows, _ = run([line("a" * 10_000_000, "long"), line("ab")])
    assert error_of(rows[0])["code"] == "context_length_exceeded"
    assert rows[0]["custom_id"] == "long"
    assert text_of(rows[1]) == "AB"


@pytest.mark.parametrize("blank", [b"", b"\n", b"\r\n", b" \t\r\n", b"\xef\xbb\xbf\r\n"])
def test_blank_lines_are_skipped_and_counted(blank: bytes) -> None:
    rows, summary = run([blank, line("ab"), blank])
    assert [row["custom_id"] for row in rows] == ["line-2"]
    assert (summary.blank, summary.num_lines) == (2, 3)


@pytest.mark.parametrize("raw", [b"\xef\xbb\xbf%s\n", b"%s\r\n", b"  %s  \n", b"%s"])
def test_byte_order_mark_and_line_ends_do_not_matter(raw: bytes) -> None:
    rows, _ = run([raw % line("ab", "x").strip()])
    assert text_of(rows[0]) == "AB"


def test_second_use_of_a_custom_id_is_an_error() -> None:
    rows, summary = run([line("ab", "x"), line("cd", "y"), line("ef", "x"), line("gh", "x")])
    assert [text_of(row) for row in rows[:2]] == ["AB", "CD"]
    for row, number in ((rows[2], 3), (rows[3], 4)):
        assert row["custom_id"] is None, "one line only has an id"
        error = error_of(row)
        assert error["code"] == "duplicate_custom_id"
        assert error["message"].startswith(f"line {number}: `custom_id` must be unique.")
        assert error["message"].endswith('Got "x", which line 1 has.')
    assert summary.failed == 2


def test_id_of_a_bad_line_is_taken_too() -> None:
    rows, _ = run([line("", "x"), line("ab", "x")])
    assert rows[0]["custom_id"] == "x"
    assert error_of(rows[1])["code"] == "duplicate_custom_id"


def test_ids_made_from_line_numbers_avoid_those_that_were_given() -> None:
    rows, summary = run([line("ab", "line-2"), line("cd"), line("ef", "line-2-2"), line("gh")])
    ids = [row["custom_id"] for row in rows]
    assert ids == ["line-2", "line-2-2", None, "line-4"]
    assert "which line 2 has" in error_of(rows[2])["message"]
    assert summary.answered == 3


def test_lines_that_the_engine_refuses_are_named_but_for_the_last_of_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows, _ = run([line("ab"), *[line("x" * 5000)] * 30, b"bad"])
    assert sum(row["error"] is None for row in rows) == 1
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(" failed: `prompt` must")[0] for text in told[:20]] == [
        f"line {number}" for number in range(2, 22)
    ]
    assert told[20:] == ["more lines failed: the output says which and why"]


def test_failure_in_the_engine_is_that_request_s_alone(caplog: pytest.LogCaptureFixture) -> None:
    rows, summary = run([line("ab"), line("break"), line("vanish"), line("cd")])
    assert [text_of(rows[0]), text_of(rows[3])] == ["AB", "CD"]
    for row, why in ((rows[1], "internal error"), (rows[2], "the request ended early (abort)")):
        error = error_of(row)
        assert (error["status"], error["type"]) == (500, "server_error")
        assert error["code"] == "engine_error"
        assert why in error["message"]
    assert summary.failed == 2
    assert "line 2 failed: internal error" in caplog.text


def test_bug_while_a_line_is_handled_is_that_line_s_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows, _ = run([line("ab"), line("boom"), line("cd")])
    assert [text_of(rows[0]), text_of(rows[2])] == ["AB", "CD"]
    error = error_of(rows[1])
    assert error["status"] == 500
    assert error["code"] == "internal_error"
    assert error["message"] == f"line 2: {job_module.INTERNAL_ERROR}"
    assert "a bug" in caplog.text
    assert caplog.records[0].levelno == logging.ERROR


def test_one_bad_prompt_fails_its_line_and_frees_the_others() -> None:
    llm = FakeLLM()
    rows, _ = run([line(["ab", "a" * 64, "cd"], "x"), line("ef")], llm, max_in_flight=1)
    assert error_of(rows[0])["code"] == "context_length_exceeded"
    assert text_of(rows[1]) == "EF"
    assert len(llm.engine.aborted) == 1, "the first prompt was in the engine already"
    assert not llm.engine.running


def test_failed_prompt_takes_the_rest_of_its_line_along() -> None:
    llm = FakeLLM()
    rows, _ = run([line(["abcdefghijkl", "vanish"], "x", max_tokens=20), line("ef")], llm)
    assert error_of(rows[0])["status"] == 500
    assert text_of(rows[1]) == "EF"
    assert not llm.engine.running


# ---------------------------------------------------------------------------------------- policy


def test_priority_and_timeout_of_a_line_go_to_the_engine() -> None:
    llm = FakeLLM()
    lines = [line("ab", "x", priority=-2, timeout=1.5), line("cd", "y"), line("ef", "z", timeout=9)]
    run(lines, llm, request_timeout=7.0)
    assert list(llm.engine.asked.values()) == [(-2, 1.5), (0, 7.0), (0, 9)]


def test_a_line_whose_time_is_over_is_an_error_line_with_that_code() -> None:
    rows, summary = run([line("linger", "x"), line("ab", "y")])
    error = error_of(rows[0])
    assert (error["status"], error["code"], error["param"]) == (408, "timeout", "timeout")
    assert error["message"] == "line 1: its time is over"
    assert (text_of(rows[1]), summary.failed) == ("AB", 1)


def test_a_full_queue_makes_prompts_wait_and_fails_none() -> None:
    llm = FakeLLM()
    llm.engine.max_queue = 2
    rows, summary = run([line(["abc", "d", "ef", "g"], "x"), line("hi", "y"), line("j")], llm)
    texts = [c["text"] for c in rows[0]["response"]["body"]["choices"]]
    assert texts == ["ABC", "D", "EF", "G"]
    assert [text_of(row) for row in rows[1:]] == ["HI", "J"]
    assert (summary.failed, llm.engine.most_sequences) == (0, 2)


def test_prompts_that_wait_for_the_queue_go_with_their_line() -> None:
    llm = FakeLLM()
    llm.engine.max_queue = 1
    rows, _ = run([line(["abcd", "vanish", "never"], "x"), line("ef")], llm)
    assert error_of(rows[0])["code"] == "engine_error"
    assert text_of(rows[1]) == "EF"
    assert "never" not in [prompt for prompt, _, _ in llm.engine.added.values()]


# ------------------------------------------------------------------------------------ interruption


def test_stopping_writes_what_is_answered_and_aborts_the_rest() -> None:
    llm = FakeLLM()
    lines = [line("abcdefgh", "long"), line("ab", "short"), line("abcdefg", "other"), b"bad"]
    steps: list[Summary] = []
    rows, summary = run(lines, llm, on_progress=steps.append, should_stop=lambda: len(steps) >= 3)
    assert summary.interrupted
    assert [row["custom_id"] for row in rows] == ["short", None]
    assert not llm.engine.running
    assert len(llm.engine.aborted) == 2


def test_stopping_reads_no_further() -> None:
    taken = []

    def lines() -> Iterable[bytes]:
        for number in range(100):
            taken.append(number)
            yield b"bad"

    _, summary = run(lines(), should_stop=lambda: len(taken) == 5)
    assert summary.interrupted
    assert summary.failed == len(taken) == 5


def test_stop_after_the_last_answer_interrupts_nothing() -> None:
    steps: list[Summary] = []
    _, summary = run([line("a")], on_progress=steps.append, should_stop=lambda: len(steps) >= 1)
    assert not summary.interrupted
    assert summary.answered == 1


def test_crash_of_the_engine_keeps_the_answers_there_are() -> None:
    written: list[str] = []
    lines = [line("abcdef", "long"), line("a", "short"), line("ab"), line("crash")]
    with pytest.raises(RuntimeError, match="the device is gone"):
        run_batch(FakeLLM(), lines, InputOrder(written.append), max_in_flight=3)
    assert [json.loads(text)["custom_id"] for text in written] == ["short"]


def test_nothing_is_written_after_a_write_that_failed() -> None:
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        if len(written) == 2:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run_batch(FakeLLM(), [line("a"), line("b"), line("c")], InputOrder(write))
    assert len(written) == 2


def test_reading_trouble_is_raised_on() -> None:
    def lines() -> Iterable[bytes]:
        yield b"bad"
        raise OSError("cannot read on")

    written: list[str] = []
    with pytest.raises(OSError, match="cannot read on"):
        run_batch(FakeLLM(), lines(), InputOrder(written.append))
    assert len(written) == 1


def test_summary_is_one_sentence() -> None:
    summary = Summary(answered=3, failed=1, prompt_tokens=10, output_tokens=20, seconds=2.0)
    assert str(summary) == (
        "3 answered, 1 failed; 10 tokens in, 20 out, in 2.0 s (10.0 tokens/s out)"
    )
    assert "(0.0 tokens/s out)" in str(Summary())
