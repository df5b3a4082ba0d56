"""The batch program from outside: files, messages, exit status, and how it finds its Python."""

from __future__ import annotations

import ast
import errno
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pagedjax.batch_job import loading, main, progress
from pagedjax.batch_job.program import JobOptions, Program
from pagedjax.config import EngineConfig
from pagedjax.errors import CapacityError, ConfigError, ModelFormatError
from tests.batch_fakes import FakeLLM

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "serve_batch.py"


def run_script(
    *arguments: object, python: str = sys.executable, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100", **environment},
        check=False,
    )


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "ab", "custom_id": "x"}\n{"prompt": "cd"}\n')
    return path


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Puts a fake in the place of the model; collects what was asked for."""
    asked: list[Any] = []

    def load(model: str, options: Any) -> FakeLLM:
        asked.append((model, options))
        return FakeLLM()

    monkeypatch.setattr(loading, "load", load)
    monkeypatch.setattr(loading, "identify", lambda model: {"name": model, "identity": model})
    return asked


def never_load(model: str, options: Any) -> Any:
    raise AssertionError(f"the model {model} was loaded with {options}")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


# ------------------------------------------------------------------------------------ exit status


def test_all_answered(
    requests: Path, tmp_path: Path, loaded: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    assert main(str(requests), str(out), model="m", options={"seed": 3}) == 0
    assert {row["custom_id"] for row in rows(out)} == {"x", "line-2"}
    assert loaded == [("m", {"seed": 3})]
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.search(r"serve_batch: 2 answered, 0 failed; 4 tokens in, 4 out, in \d", shown.err)


def test_some_failed(requests: Path, tmp_path: Path, loaded: list[Any]) -> None:
    requests.write_bytes(requests.read_bytes() + b"bad\n")
    out = tmp_path / "out.jsonl"
    assert main(str(requests), str(out), model="m", options={}) == 3
    (failed,) = [row for row in rows(out) if row["error"]]
    assert failed["error"]["message"].startswith("line 3: ")


def test_without_output_answers_go_to_standard_output(
    requests: Path, loaded: list[Any], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(str(requests), None, model="m", options={}) == 0
    shown = capfdbinary.readouterr()
    assert [json.loads(line)["custom_id"] for line in shown.out.splitlines()] == ["x", "line-2"]
    assert b"2 answered" in shown.err


def test_empty_input_needs_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "load", never_load)
    (tmp_path / "in").touch()
    assert main(str(tmp_path / "in"), str(tmp_path / "out"), model="m", options={}) == 0
    assert (tmp_path / "out").read_text() == ""
    assert "0 answered, 0 failed" in capsys.readouterr().err
    assert main(str(tmp_path / "in"), None, model="m", options={}) == 0
    assert "is empty: nothing to answer" in capsys.readouterr().err


def test_blank_lines_alone_are_answered_by_nothing(tmp_path: Path, loaded: list[Any]) -> None:
    (tmp_path / "in").write_text("\n\r\n")
    assert main(str(tmp_path / "in"), str(tmp_path / "out"), model="m", options={}) == 0
    assert (tmp_path / "out").read_text() == ""


def test_engine_that_breaks_ends_with_70(
    requests: Path, tmp_path: Path, loaded: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"prompt": "a"}] * 9 + [{"prompt": "crash"}]
    requests.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out.jsonl"
    assert main(str(requests), str(out), model="m", options={}) == 70
    assert not out.exists()
    assert 0 < len(rows(tmp_path / "out.jsonl.partial")) < 9
    shown = capsys.readouterr().err
    assert (
        "error: the engine failed (the device is gone); The answers so far are in "
        f"{out}.partial; run the same command again to continue." in shown
    )


def test_device_that_takes_nothing_ends_with_70(
    requests: Path, loaded: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    assert main(str(requests), "/dev/full", model="m", options={}) == 70
    shown = capsys.readouterr().err
    assert f"error: cannot write to /dev/full: {os.strerror(errno.ENOSPC)}" in shown
    assert "Traceback" not in shown


# ------------------------------------------------------------------------------------ not started


@pytest.mark.parametrize(
    ("source", "output", "options", "message"),
    [
        ("nothing.jsonl", "out", {}, "cannot read the input .*nothing.jsonl: No such file"),
        (".", "out", {}, "the input .* must be a file of JSON lines. Got a directory"),
        ("https://example.org/a", "out", {}, "the input must be a local file. Got the address"),
        ("in.jsonl", "https://example.org/a", {}, "the output must be a local file"),
        ("in.jsonl", "in.jsonl", {}, "the output .*in.jsonl must not be the input itself"),
        ("in.jsonl", "link.jsonl", {}, "the output .*link.jsonl must not be the input itself"),
        ("in.jsonl", "no/out", {}, "the output's folder .*no must exist"),
        ("in.jsonl", ".", {}, "cannot write the output .*: it is a directory"),
        (
            "in.jsonl",
            "out",
            {"event_log": "in.jsonl"},
            "the event log in.jsonl must be a file of its",
        ),
        ("in.jsonl", "out", {"event_log": "no/log"}, "the event log no/log must be a file in a"),
        ("in.jsonl", "out", {"page_size": 24}, "`page_size` must be a power of two, 1 to 256"),
        ("in.jsonl", "out", {"memory_utilization": 2.0}, "`memory_utilization` must be a number"),
        ("in.jsonl", "out", {"max_num_seqs": 0}, "`max_num_seqs` must be an integer in"),
        ("in.jsonl", "out", {"dtype": "int8"}, "`dtype` must be auto, float32"),
        ("in.jsonl", "out", {"pagesize": 1}, "`pagesize` is not an engine option. Did you mean"),
    ],
)
def test_what_stops_the_start_is_said_before_the_model_is_loaded(
    source: str,
    output: str,
    options: dict[str, Any],
    message: str,
    requests: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(requests.parent)
    monkeypatch.setattr(loading, "load", never_load)
    (requests.parent / "link.jsonl").symlink_to(requests)
    before = requests.read_bytes()
    assert main(source, output, model="m", options=options) == 2
    shown = capsys.readouterr()
    assert re.search("^serve_batch: error: " + message, shown.err)
    assert shown.err.count("\n") == 1
    assert requests.read_bytes() == before
    assert not (requests.parent / "out").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_files_without_permission_stop_the_start(
    requests: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.touch(mode=0o400)
    assert main(str(requests), str(out), model="m", options={}) == 2
    requests.chmod(0)
    assert main(str(requests), None, model="m", options={}) == 2
    shown = capsys.readouterr().err
    assert "cannot write the output" in shown
    assert "cannot read the input" in shown


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConfigError("`num_pages` must be at least 5."), "error: `num_pages` must be at least 5."),
        (ModelFormatError("weights are truncated."), "error: weights are truncated."),
        (CapacityError("needed 3 GiB, got 2."), "error: needed 3 GiB, got 2."),
        (FileNotFoundError(2, "No such file", "m.gguf"), "cannot read the model 'm': .*m.gguf"),
        (ImportError("No module named 'gguf'"), "No module named 'gguf'. Install what is missing"),
        (MemoryError("no room"), "out of memory .*no room. Lower --gpu-memory-utilization"),
        (
            RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 5 bytes"),
            "out of memory while loading .* Out of memory allocating 5 bytes. Lower --gpu-mem",
        ),
        (
            KeyError("odd"),
            r"cannot load the model 'm': KeyError: 'odd' \(test_serve_batch.py, line",
        ),
    ],
)
@pytest.mark.parametrize("old", [None, "old answers\n"])
def test_model_that_cannot_be_loaded_stops_the_start(
    error: Exception,
    message: str,
    old: str | None,
    requests: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Broken:
        def __init__(self, model: str, **options: Any) -> None:
            raise error

    monkeypatch.setitem(sys.modules, "pagedjax.llm", type(sys)("pagedjax.llm"))
    monkeypatch.setattr(sys.modules["pagedjax.llm"], "LLM", Broken, raising=False)
    monkeypatch.setattr(loading, "identify", lambda model: {"name": model, "identity": model})
    out = tmp_path / "out.jsonl"
    if old is not None:
        out.write_text(old)
    assert main(str(requests), str(out), model="m", options={}, overwrite=True) == 2
    _loading, shown, *rest = capsys.readouterr().err.splitlines()
    assert re.search("^serve_batch: .*" + message, shown)
    assert not rest
    assert (out.read_text() if out.exists() else None) == old, "earlier answers are kept"
    assert set(os.listdir(tmp_path)) <= {"in.jsonl", "out.jsonl"}


# ---------------------------------------------------------------------------- interrupts, progress


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_after_the_step_and_the_same_command_continues(
    number: signal.Signals,
    requests: Path,
    tmp_path: Path,
    loaded: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    llm = FakeLLM()
    step = llm.engine.step

    def interrupted_step() -> Any:
        if len(llm.engine.running) == 1:
            os.kill(os.getpid(), number)
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted_step)
    monkeypatch.setattr(loading, "load", lambda model, options: llm)
    requests.write_text('{"prompt": "a"}\n{"prompt": "abcdef"}\n')
    out = tmp_path / "out.jsonl"
    before = signal.getsignal(number)
    assert main(str(requests), str(out), model="m", options={}) == 75
    assert signal.getsignal(number) is before
    assert not out.exists()
    assert [row["custom_id"] for row in rows(tmp_path / "out.jsonl.partial")] == ["line-1"]
    shown = capfd.readouterr().err
    assert "stopping after this step; a second signal stops at once" in shown
    assert f"The answers so far are in {out}.partial; run the same command again" in shown
    assert not llm.engine.running
    monkeypatch.setattr(loading, "load", lambda model, options: FakeLLM())
    assert main(str(requests), str(out), model="m", options={}) == 0
    assert [row["custom_id"] for row in rows(out)] == ["line-1", "line-2"]
    assert "1 answered, 0 failed; 1 were done before" in capfd.readouterr().err


@pytest.mark.usefixtures("ctrl_c")
def test_signal_without_a_file_leaves_nothing_to_continue(
    requests: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = FakeLLM()
    step = llm.engine.step

    def interrupted_step() -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted_step)
    monkeypatch.setattr(loading, "load", lambda model, options: llm)
    assert main(str(requests), None, model="m", options={}) == 130
    assert "interrupted; the answers so far are in standard output" in capsys.readouterr().err


@pytest.mark.usefixtures("ctrl_c")
def test_second_ctrl_c_ends_at_once(
    requests: Path,
    tmp_path: Path,
    loaded: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    llm = FakeLLM()

    def stuck_step() -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the second signal went by")

    monkeypatch.setattr(llm.engine, "step", stuck_step)
    monkeypatch.setattr(loading, "load", lambda model, options: llm)
    assert main(str(requests), str(tmp_path / "out"), model="m", options={}) == 75
    assert "interrupted. The answers so far" in capsys.readouterr().err


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_a_finished_job_closes_its_files_changes_nothing(
    number: signal.Signals,
    requests: Path,
    loaded: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run, out = Program.run, requests.parent / "out"

    def run_and_close(program: Program, *paths: Any) -> int:
        program._stack.callback(os.kill, os.getpid(), number)
        return run(program, *paths)

    monkeypatch.setattr(Program, "run", run_and_close)
    assert main(str(requests), str(out), model="m", options={}) == 0
    assert len(rows(out)) == 2
    shown = capfd.readouterr().err
    assert "2 answered, 0 failed" in shown
    assert "stopping" not in shown


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(("name", "status"), [("out", 75), (None, 130)])
def test_signal_while_loading_is_not_kept(
    name: str | None,
    status: int,
    requests: Path,
    loaded: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(model: str, options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal went by")

    monkeypatch.setattr(loading, "load", load)
    out = None if name is None else str(requests.parent / name)
    assert main(str(requests), out, model="m", options={}) == status
    assert "serve_batch: interrupted before the first line was answered" in capsys.readouterr().err
    assert sorted(os.listdir(requests.parent)) == ["in.jsonl"], "nothing is left behind"


def test_progress_lines_where_there_is_no_terminal(
    requests: Path,
    loaded: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    assert main(str(requests), None, model="m", options={}) == 0
    assert "serve_batch: 2 of 2 lines: 2 answered, 0 failed" in capsys.readouterr().err


def test_input_may_be_a_pipe(tmp_path: Path, loaded: list[Any], requests: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, requests.read_bytes())
    os.close(writing)
    out = tmp_path / "out.jsonl"
    assert main(f"/dev/fd/{reading}", str(out), model="m", options={}) == 0
    os.close(reading)
    assert len(rows(out)) == 2


# ------------------------------------------------------------------------------------- the script


def test_script_says_what_is_wrong_without_a_traceback(tmp_path: Path) -> None:
    result = run_script(tmp_path / "nothing.jsonl")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("serve_batch: error: cannot read the input ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: INPUT.jsonl"),
        (("a", "--page-siz", "4"), "unrecognized arguments: --page-siz 4"),
        (("a", "--page-size", "four"), "argument --page-size/--block-size: invalid int value"),
        (("a", "--seed"), "argument --seed: expected one argument"),
    ],
)
def test_bad_argument_takes_two_lines(arguments: tuple[str, ...], message: str) -> None:
    result = run_script(*arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(f"serve_batch: error: {message}")
    assert result.stderr.endswith("\nserve_batch: see --help\n")
    assert result.stderr.count("\n") == 2


def test_bad_option_value_is_the_engine_s_message(requests: Path) -> None:
    result = run_script(requests, "--page-size", "24")
    assert result.returncode == 2
    assert result.stderr == (
        "serve_batch: error: `page_size` must be a power of two, 1 to 256. Got 24.\n"
    )


def test_arguments_become_options() -> None:
    parsed = load_script().parser().parse_args([
        "in", "-o", "out", "--model", "m", "--dtype", "float32", "--seed", "5",
        "--max-model-len", "64", "--memory-utilization", "0.5", "--num-pages", "9",
        "--block-size", "4", "--max-num-seqs", "3", "--max-num-batched-tokens", "32",
        "--no-enable-prefix-caching", "--attention-implementation", "xla",
    ])  # fmt: skip
    assert vars(parsed) == {
        "input": "in", "output": "out", "model": "m", "dtype": "float32", "seed": 5,
        "max_model_len": 64, "memory_utilization": 0.5, "num_pages": 9, "page_size": 4,
        "max_num_seqs": 3, "max_num_batched_tokens": 32, "enable_prefix_caching": False,
        "attention_implementation": "xla",
    }  # fmt: skip


@pytest.mark.parametrize("suffix", ["", ".partial", ".manifest.json", ".lock", ".input"])
def test_an_event_log_takes_no_name_that_the_job_needs_later(
    requests: Path, loaded: list[Any], capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    output = requests.with_name("new.jsonl")  # no such file yet
    link = requests.with_name("log")
    link.symlink_to(output.with_name(output.name + suffix))
    for path in (link.resolve(), link):
        assert main(str(requests), str(output), model="m", options={"event_log": str(path)}) == 2
        assert f"error: the event log {path} must be a file of its own" in capsys.readouterr().err
    assert loaded == []


def test_an_event_log_and_figures_are_two_files(
    requests: Path, loaded: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(requests.with_name("log"))
    assert main(str(requests), None, model="m", options={"event_log": path}, stats=path) == 2
    assert f"error: the event log {path} must be a file of its own" in capsys.readouterr().err
    assert loaded == []


@pytest.mark.parametrize("where", ["in.jsonl", "out.jsonl", "no/log", "."])
def test_an_event_log_that_cannot_be_is_refused_before_the_model_is_loaded(
    requests: Path, loaded: list[Any], capsys: pytest.CaptureFixture[str], where: str
) -> None:
    before, output = requests.read_text(), requests.with_name("out.jsonl")
    output.write_text("old")
    path = requests.parent / where
    assert main(str(requests), str(output), model="m", options={"event_log": str(path)}) == 2
    assert f"error: the event log {path} must " in capsys.readouterr().err
    assert loaded == []
    assert requests.read_text() == before
    assert output.read_text() == "old"


def test_every_engine_option_has_an_argument() -> None:
    actions = load_script().parser()._actions
    for_servers = {"max_queue_requests", "max_queue_tokens"}  # a batch brings its own queue
    options = {field.name for field in fields(EngineConfig)} - for_servers
    assert options <= {action.dest for action in actions}


def test_every_job_option_has_an_argument() -> None:
    script = load_script()
    names = {field.name for field in fields(JobOptions)}
    assert names == set(script.JOB_OPTIONS)
    assert names <= {action.dest for action in script.parser()._actions}


def test_help_is_complete() -> None:
    result = run_script("--help")
    assert result.returncode == 0
    for word in ("--model", "--gpu-memory-utilization", "exit status", "custom_id", "example",
                 "OUT.partial", "OUT.manifest.json", "75 interrupted"):  # fmt: skip
        assert word in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("serve_batch", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_script_can_be_run_directly() -> None:
    assert os.access(SCRIPT, os.X_OK)
    assert SCRIPT.read_text().startswith("#!/usr/bin/env python3\n")


def test_old_pythons_can_read_the_script() -> None:
    ast.parse(SCRIPT.read_text("utf-8"), feature_version=(3, 6))


def bare_checkout(tmp_path: Path) -> Path:
    """A checkout of its own; a Python without site-packages stands for a foreign one."""
    (tmp_path / "scripts").mkdir()
    return Path(shutil.copy(SCRIPT, tmp_path / "scripts"))


def test_foreign_python_is_told_where_the_right_one_comes_from(tmp_path: Path) -> None:
    script = bare_checkout(tmp_path)
    result = subprocess.run(
        [sys._base_executable, "-S", str(script), "in.jsonl"],  # type: ignore[attr-defined]
        capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert result.returncode == 2
    assert "lacks what pagedjax needs: run scripts/demo once" in result.stderr
    assert result.stderr.count("\n") == 1


def test_foreign_python_hands_over_to_the_checkout_s_own(tmp_path: Path) -> None:
    script = bare_checkout(tmp_path)
    own = tmp_path / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    own.chmod(0o755)
    result = subprocess.run(
        [sys._base_executable, "-S", str(script), "in 1.jsonl", "--seed", "2"],  # type: ignore[attr-defined]
        capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert result.stdout.splitlines() == [str(script), "in 1.jsonl", "--seed", "2"]


# ------------------------------------------------------------------------- with the real loader


def gguf_header(path: Path) -> None:
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + b"\x00" * 10)


def wrong_magic(path: Path) -> None:
    path.write_bytes(b"<html>not found</html>")


def empty_folder(path: Path) -> None:
    path.mkdir()


def nothing(path: Path) -> None:
    del path  # it does not exist


@pytest.mark.parametrize("make", [gguf_header, wrong_magic, empty_folder, nothing])
def test_model_files_that_are_no_model_stop_the_start(
    make: Callable[[Path], None],
    requests: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tmp_path / "model.gguf"
    make(model)
    out = tmp_path / "out.jsonl"
    assert main(str(requests), str(out), model=str(model), options={}) == 2
    shown = capsys.readouterr().err
    assert "serve_batch: error: " in shown
    assert "model.gguf" in shown
    assert "Traceback" not in shown
    assert "cannot load the model" not in shown, "an error that nobody foresaw"
    assert not out.exists()
