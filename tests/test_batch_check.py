"""--check: what would run, counted with the model's own tokenizer and without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedjax.batch_job import loading, main
from pagedjax.batch_job.output import manifest_of
from tests.tiny_checkpoint import tiny_checkpoint

LINES: list[Any] = [
    {"prompt": "abc", "max_tokens": 5},  # 3 in, 5 out
    {"prompt": [4, 5, 6, 7], "n": 3},  # 4 in, 3 x 16 out
    {"prompt": ["ab", "cde"], "max_tokens": 2},  # 5 in, 4 out
    {"messages": [{"role": "user", "content": "abcdef"}]},  # 6 in, to the end: 64 - 6
    {"prompt": "a" * 60, "max_tokens": 99},  # 60 in, 4 out
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"))
    (folder / "model.safetensors").write_bytes(b"")  # the weights are not read
    return str(folder)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("\n\n".join(map(json.dumps, LINES)) + "\n")
    return path


def test_check_counts_and_runs_nothing(
    source: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    assert main(str(source), str(out), model=model, options={}, check=True, rate=7.0) == 0
    assert capsys.readouterr().err.splitlines() == [
        "serve_batch: 5 requests (8 answers): 78 prompt tokens, at most 119 new tokens; "
        "0 bad lines, 4 blank ones",
        "serve_batch: at most about 17 s, at 7 output tokens/s (--rate)",
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl"]


def test_check_shows_bad_lines_and_ends_with_3(
    source: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with source.open("a") as file:
        file.write('{"prompt": "%s"}\nbad\n{"messages": []}\n' % ("a" * 64))
    assert main(str(source), None, model=model, options={}, check=True) == 3
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "serve_batch: line 10: `prompt` must have at most 63 tokens. Got 64."
    assert shown[1].startswith("serve_batch: line 11: a line must be one JSON object.")
    assert shown[2].startswith("serve_batch: line 12: `messages` must")
    assert "; 3 bad lines, 4 blank ones" in shown[3]
    assert shown[4].startswith("serve_batch: no estimate of time: give --rate N")


def test_check_heeds_a_shorter_model_len(
    source: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(str(source), None, model=model, options={"max_model_len": 16}, check=True) == 3
    shown = capsys.readouterr().err
    assert "line 9: `prompt` must have at most 15 tokens. Got 60." in shown
    assert "18 prompt tokens, at most 55 new tokens" in shown  # 5, 3 x 12, 4, 10


@pytest.mark.parametrize(
    ("body", "policy", "message"),
    [
        ({"priority": -1}, "fcfs", "`priority` must be 0 unless the engine runs with"),
        ({"priority": 2**40}, "priority", "`priority` must be an integer in"),
        ({"timeout": -2}, "fcfs", "`timeout` must be seconds in (0, 1e+09] or None. Got -2."),
        ({"cache_salt": 7}, "fcfs", "`cache_salt` must"),
    ],
)
def test_check_refuses_what_the_engine_will(
    body: dict[str, Any], policy: str, message: str, source: Path, model: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    source.write_text(json.dumps({"prompt": "ab", **body}) + '\n{"prompt": "ab"}\n')
    given = {"scheduling_policy": policy}
    assert main(str(source), None, model=model, options=given, check=True) == 3
    shown = capsys.readouterr().err
    assert f"serve_batch: line 1: {message}" in shown
    assert "1 requests (1 answers)" in shown


def test_the_estimate_is_at_the_rate_of_the_output_s_last_run(
    source: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    manifest_of(str(out)).write_text(json.dumps({
        "format": 1, "input": {"lines": 5, "answers": 5}, "model": {}, "parameters": {},
        "version": "", "is_complete": False, "last_run": {"output_tokens_per_s": 0.5},
    }))  # fmt: skip
    assert main(str(source), str(out), model=model, options={}, check=True) == 0
    assert "at most about 4 min, at 0.5 output tokens/s (this output's last run)" in (
        capsys.readouterr().err
    )


def test_check_without_a_model_says_so(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(str(source), None, model="nowhere/at/all", options={}, check=True) == 2
    assert "error: `model` must be a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"rate": 0.0}, "--rate must be tokens a second, more than 0. Got 0."),
        ({"max_inflight": 0}, "--max-inflight must be at least 1. Got 0."),
        ({"on_bad_line": "ignore"}, "--on-bad-line must be error-record or abort. Got ignore."),
        ({"request_timeout": -1.0}, "--request-timeout must be seconds in (0, 1e+09]. Got -1."),
        ({"stats": "/nowhere/stats"}, "cannot write --stats /nowhere/stats: No such file"),
    ],
)
def test_job_options_that_make_no_sense_start_nothing(
    how: dict[str, Any], message: str, source: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("the model was loaded"))
    monkeypatch.setattr(loading, "identify", lambda model: {"name": model, "identity": model})
    out = str(tmp_path / "out.jsonl")
    assert main(str(source), out, model="m", options={}, **how) == 2
    assert f"serve_batch: error: {message}" in capsys.readouterr().err


def test_identity_of_a_model_is_that_of_its_files(tmp_path: Path) -> None:
    one = tiny_checkpoint(tmp_path / "one")
    same = tiny_checkpoint(tmp_path / "same")
    assert loading.identify(str(one))["identity"] == loading.identify(str(same))["identity"]
    other = tiny_checkpoint(tmp_path / "other", seed=1)
    assert loading.identify(str(one))["identity"] != loading.identify(str(other))["identity"]


def test_identity_of_large_files_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_WHOLE_BYTES", 2**20)
    path = tmp_path / "m.gguf"
    data = bytearray(64 * 2**20)
    path.write_bytes(data)
    found = {loading.identify(str(path))["identity"]}
    sample = (len(data) - 2**16) * 64 // 127  # one in the middle
    for at in (0, sample, len(data) - 1):
        data[at] = 1
        path.write_bytes(data)
        found.add(loading.identify(str(path))["identity"])
        data[at] = 0
    path.write_bytes(data[:-1])
    found.add(loading.identify(str(path))["identity"])
    assert len(found) == 5
