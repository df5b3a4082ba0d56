"""Bad lines of every kind in one job with a real engine: each is told, no other one suffers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagedjax.batch_job import loading, main
from pagedjax.batch_job.lines import MAX_LINE_BYTES
from pagedjax.batch_job.precheck import MAX_SHOWN, check_lines
from pagedjax.chat_template import ChatTemplate, encode_chat
from tests.helpers import ByteTokenizer
from tests.tiny_engine import tiny_llm

type Row = dict[str, Any]


def short(**body: Any) -> bytes:
    return json.dumps({"prompt": "abc", **body}).encode()


def full(**fields: Any) -> bytes:
    document = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "abc"}, **fields}
    return json.dumps({k: v for k, v in document.items() if v is not None}).encode()


def chat(*messages: Any, **body: Any) -> bytes:
    return json.dumps({"messages": list(messages), **body}).encode()


# What it is -> the line, and words of its error.
BAD: dict[str, tuple[bytes, str]] = {
    # bytes
    "not UTF-8": (b'{"prompt": "\xff\xfe"}', "must be UTF-8 text. Byte 13 is 0xff"),
    "overlong UTF-8": (b'{"prompt": "\xc0\xaf"}', "must be UTF-8 text. Byte 13 is 0xc0"),
    "a surrogate in UTF-8": (b'{"prompt": "\xed\xa0\x80"}', "must be UTF-8 text. Byte 13 is 0xed"),
    "UTF-16": (b"\xff\xfe{\x00}\x00", "must be UTF-8 text. Byte 1 is 0xff"),
    "NUL bytes": (b"\x00" * 50, "must be one JSON object"),
    "NUL in a string": (b'{"prompt": "a\x00b"}', "Invalid control character at character 14"),
    "a tab in a string": (b'{"prompt": "a\tb"}', "Invalid control character"),
    "a carriage return within": (b'{"prompt": "a\rb"}', "Invalid control character"),
    "10 MB": (short(prompt="a" * 10_000_000), "127 tokens"),
    "too long to read": (short(prompt="a" * MAX_LINE_BYTES), f"at most {MAX_LINE_BYTES} bytes"),
    # JSON
    "not JSON": (b"hello", "must be one JSON object. Got Expecting value at character 1"),
    "cut off": (b'{"prompt": "abc', "Unterminated string"),
    "two objects": (b'{"prompt": "a"}{"prompt": "b"}', "Extra data at character 16"),
    "a trailing comma": (b'{"prompt": "a",}', "must be one JSON object"),
    "single quotes": (b"{'prompt': 'a'}", "must be one JSON object"),
    "a comment": (b'{"prompt": "a"} // hello', "Extra data"),
    "a list": (b'[{"prompt": "a"}]', "must be a JSON object. Got a list"),
    "a string": (b'"prompt"', "must be a JSON object. Got a string"),
    "a number": (b"12", "must be a JSON object. Got a number"),
    "null": (b"null", "must be a JSON object. Got null"),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', "must be JSON, which has no NaN"),
    "Infinity": (b'{"prompt": "a", "top_p": Infinity}', "which has no Infinity"),
    "a float beyond floats": (b'{"prompt": "a", "temperature": 1e999}', "must be a finite number"),
    "5000 digits": (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "must have fewer digits"),
    "4000 digits": (b'{"prompt": "a", "seed": ' + b"9" * 4000 + b"}", "`seed` must be"),
    "a key twice": (b'{"prompt": "a", "prompt": "b"}', "`prompt` must be given once"),
    "half a surrogate pair": (b'{"prompt": "\\ud800"}', "Got half of a surrogate pair"),
    "100 lists deep": (b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}", "deeper than 64"),
    "100000 lists deep": (b"[" * 100_000 + b"]" * 100_000, "deeper than 64"),
    # the form of a request
    "an empty object": (b"{}", "Got none of them"),
    "prompt and messages": (short(messages=[]), "Got `prompt` and `messages`"),
    "no custom_id": (full(), "`custom_id` must be a string"),
    "a custom_id of a number": (full(custom_id=7), "`custom_id` must be a string"),
    "a custom_id too long": (full(custom_id="x" * 513), "of 1 to 512 characters"),
    "an id that is taken": (full(custom_id="good-0"), 'Got "good-0", which line 1 has'),
    "an unknown url": (full(custom_id="b1", url="/v1/embeddings"), "`url` must be /v1/completions"),
    "a whole url": (full(custom_id="b2", url="https://x.org/v1/completions"), "`url` must be /v1"),
    "a url that is a list": (full(custom_id="b3", url=["/v1/completions"]), "`url` must be /v1"),
    "method GET": (full(custom_id="b4", method="GET"), '`method` must be "POST"'),
    "no body": (full(custom_id="b5", body=None), "`body` must be an object. Got nothing"),
    "a body of text": (full(custom_id="b6", body="{}"), "`body` must be an object. Got a string"),
    "a parameter outside the body": (full(custom_id="b7", n=2), "`n` is not a field of a batch"),
    # parameters
    "n of 10^9": (short(n=10**9), "`n` must be an integer in [1, 128]"),
    "n of a string": (short(n="2"), "`n` must be an integer"),
    "n of true": (short(n=True), "`n` must be an integer"),
    "n beyond a step": (short(n=100), "`n` must be at most `max_num_seqs` (8). Got 100"),
    "256 prompts of 128 answers": (short(prompt=["a"] * 256, n=128), "at most 512"),
    "300 prompts": (short(prompt=["a"] * 300), "at most 256 prompts. Got 300"),
    "temperature below 0": (short(temperature=-0.1), "`temperature` must be"),
    "temperature of text": (short(temperature="hot"), "`temperature` must be"),
    "max_tokens of 0": (short(max_tokens=0), "`max_tokens` must be"),
    "max_tokens of 1.5": (short(max_tokens=1.5), "`max_tokens` must be"),
    "an unknown parameter": (short(temprature=0), "`temprature` is not a parameter of"),
    "an unsupported one": (short(stream=True), "`stream` is not supported here"),
    "logprobs of 10^6": (short(logprobs=10**6), "`logprobs` must be"),
    "logit_bias of a list": (short(logit_bias=[1]), "`logit_bias` must map"),
    "logit_bias beyond the words": (short(logit_bias={"99": 1}), "`logit_bias` must hold"),
    "stop of numbers": (short(stop=[1]), "`stop` must"),
    "an empty prompt": (short(prompt=""), "`prompt` must not be empty"),
    "no prompts": (short(prompt=[]), "`prompt` must not be empty"),
    "a prompt of objects": (short(prompt=[{}]), "`prompt` must"),
    "a prompt of true": (short(prompt=[1, True]), "`prompt` must hold"),
    "a token below 0": (short(prompt=[1, -1]), "`prompt` must hold token ids in [0, 32)"),
    "a token too large": (short(prompt=[1, 2**70]), "`prompt` must hold token ids"),
    "a prompt too long": (short(prompt="a" * 128), "at most 127 tokens"),
    "a priority without use": (short(priority=3), "`priority` must be 0"),
    "a timeout below 0": (short(timeout=-1), "`timeout` must be seconds"),
    "messages of text": (b'{"messages": "hi"}', "`messages` must be"),
    "no messages": (chat(), "`messages` must"),
    "a message without a role": (chat({"content": "a"}), "role"),
    "a content that is a number": (chat({"role": "user", "content": 5}), "content"),
    "a tool": (chat({"role": "user", "content": "a"}, tools=[{}]), "`tools` is not supported"),
}  # fmt: skip

GOOD = [b'{"custom_id": "good-%d", "prompt": "%s", "max_tokens": 4}' % (i, b"abcdefgh"[: i % 7 + 1])
        for i in range(len(BAD) + 1)]  # fmt: skip


@pytest.fixture(autouse=True)
def real_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tiny_llm()
    template = ChatTemplate("{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}")
    llm = SimpleNamespace(
        engine=shared.engine, report=shared.report, tokenizer=ByteTokenizer(), model_name="tiny",
        default_params={}, encode_chat=lambda m: encode_chat(ByteTokenizer(), template, m),
    )  # fmt: skip
    monkeypatch.setattr(loading, "load", lambda model, options: llm)
    monkeypatch.setattr(loading, "identify", lambda model: {"name": model, "identity": model})


def answer(folder: Path, lines: list[bytes]) -> tuple[int, list[Row]]:
    folder.mkdir()
    (folder / "in").write_bytes(b"\n".join(lines))
    status = main(str(folder / "in"), str(folder / "out"), model="m", options={}, ordered=True)
    rows = [json.loads(line) for line in (folder / "out").read_text("utf-8").splitlines()]
    return status, rows


def test_every_bad_line_is_told_and_every_other_line_is_answered(tmp_path: Path) -> None:
    assert len(BAD) >= 40
    mixed = [line for pair in zip(GOOD, [bad for bad, _ in BAD.values()], strict=False)
             for line in pair] + [GOOD[-1]]  # fmt: skip
    status, alone = answer(tmp_path / "alone", GOOD)
    assert status == 0
    status, rows = answer(tmp_path / "mixed", mixed)
    assert status == 3
    assert rows[0::2] == alone, "the answers are those of a job without bad lines"
    assert len(rows) == len(mixed)
    for place, (row, (kind, (_, words))) in enumerate(zip(rows[1::2], BAD.items(), strict=True)):
        error = row["error"]
        assert error is not None, kind
        assert error["message"].startswith(f"line {2 * place + 2}: "), kind
        assert words in error["message"], f"{kind}: {error['message']}"
        assert len(error["message"]) < 400, kind
        assert row["response"]["status_code"] == 400, kind
        assert row["response"]["body"]["error"]["code"] == error["code"], kind
    tiny_llm().engine.check_integrity()


@pytest.mark.parametrize("wrap", [
    pytest.param(lambda line: b"\xef\xbb\xbf" + line, id="a byte order mark"),
    pytest.param(lambda line: line + b"\r", id="CRLF"),
    pytest.param(lambda line: b"\n\n \t\n" + line + b"\n\r\n", id="empty lines around"),
    pytest.param(lambda line: b"  \t" + line + b"   ", id="white space"),
    pytest.param(lambda line: line.replace(b": ", b":").replace(b"a", b"\\u0061"), id="escapes"),
    pytest.param(lambda line: line[:-1] + b', "user": "me", "metadata": {"k": "v"}}', id="notes"),
])  # fmt: skip
def test_what_only_looks_odd_is_answered(wrap: Any, tmp_path: Path) -> None:
    status, rows = answer(tmp_path / "odd", [wrap(GOOD[3]), GOOD[4]])
    assert status == 0
    assert [row["custom_id"] for row in rows] == ["good-3", "good-4"]
    _, plain = answer(tmp_path / "plain", [GOOD[3], GOOD[4]])
    assert rows == plain


def test_a_job_may_be_told_to_begin_with_good_lines_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_bytes(b"\n".join([GOOD[0], b"bad", GOOD[1], b"[]", GOOD[0]]))
    how: Row = {"model": "m", "options": {}, "on_bad_line": "abort"}
    assert main(str(tmp_path / "in"), str(tmp_path / "out"), **how) == 2
    shown = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2][:6] for line in shown[:3]] == ["line 2", "line 4", "line 5"]
    assert shown[3] == "serve_batch: error: 3 lines are bad, and --on-bad-line is abort."
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


def test_what_is_found_ahead_becomes_an_error_line() -> None:
    """The check reads lines as the job does: it may find less, and never more."""
    found = check_lines([bad for bad, _ in BAD.values()], "fcfs")
    assert found.requests + found.num_bad == len(BAD)
    needs_engine = {
        "10 MB", "n beyond a step", "logit_bias beyond the words", "a token below 0",
        "a token too large", "a prompt too long", "messages of text", "no messages",
        "a message without a role", "a content that is a number", "an id that is taken",
    }  # fmt: skip
    assert found.requests == len(needs_engine)
    assert len(found.bad) == MAX_SHOWN
    assert found.lines()[-1] == f"and {found.num_bad - MAX_SHOWN} more bad lines"
