"""Messages of the batch program when nobody can read them, and its end when signals come late."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pagedjax.batch_job import files, loading, main, messages
from pagedjax.batch_job.messages import STANDARD_ERROR, say
from pagedjax.batch_job.output import FileOutput
from pagedjax.interrupts import DeferredInterrupt
from tests.batch_fakes import FakeLLM

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "serve_batch.py"
LINES = '{"prompt": "ab"}\n{"prompt": "cd"}\nbad\n'
# Stands in for a model that loads, so that whole programs take a second.
FAKE = """
import sys
from pagedjax.batch_job import loading
from tests.batch_fakes import FakeLLM
loading.load = lambda model, options: FakeLLM()
loading.identify = lambda model: {"name": model, "identity": model}
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text(LINES)
    monkeypatch.setattr(loading, "load", lambda model, options: FakeLLM())
    monkeypatch.setattr(loading, "identify", lambda model: {"name": model, "identity": model})
    return path


@contextmanager
def nobody_reads(number: int) -> Iterator[None]:
    """A pipe without a reader under this descriptor."""
    kept = os.dup(number)
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, number)
    os.close(writer)
    try:
        yield
    finally:
        os.dup2(kept, number)
        os.close(kept)


def run(code: str, *arguments: object, **how: Any) -> subprocess.CompletedProcess[bytes]:
    """A process with the fake model."""
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent.parent), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", FAKE + code, *map(str, arguments)]
    return subprocess.run(command, env=environment, check=False, timeout=120, **how)


MAIN = """
from pagedjax.batch_job import main
sys.exit(main(sys.argv[1], sys.argv[2] if sys.argv[2:] else None, model="m", options={}))
"""


# ---------------------------------------------------------------------------- nobody reads them


def test_a_reader_of_messages_that_is_gone_ends_no_job(source: Path, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    out = tmp_path / "out"
    assert run(MAIN, source, out, stderr=writer).returncode == 3
    os.close(writer)
    assert out.read_bytes().count(b"\n") == 3


def test_a_stream_that_is_full_loses_a_message_and_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(text: str) -> int:
        raise BlockingIOError

    with monkeypatch.context() as patch:
        patch.setattr(sys.stderr, "write", full)
        say("one")
    say("two")
    assert capsys.readouterr().err == "serve_batch: two\n"


def test_a_stream_that_was_closed_takes_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path(os.devnull).open("w")  # noqa: SIM115 (it is closed here)
    file.close()
    monkeypatch.setattr(messages.sys, "stderr", file)
    say("nothing is raised")
    STANDARD_ERROR.flush()


@pytest.mark.usefixtures("ctrl_c")
def test_a_notice_that_nobody_reads_is_no_error_where_the_signal_came() -> None:
    with DeferredInterrupt(signal.SIGINT, notice=b"stopping") as interrupt:
        with nobody_reads(2):
            signal.raise_signal(signal.SIGINT)  # raises nothing
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()


def test_without_standard_error_a_job_runs_and_writes_into_no_file(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    code = "import os; os.close(2); sys.stderr = None\n" + MAIN
    assert run(code, source, out).returncode == 3
    assert out.read_bytes().count(b"\n") == 3
    assert source.read_text() == LINES


@pytest.mark.parametrize(
    ("closed", "arguments", "message"),
    [
        ("stdout", ["IN"], b"error: standard output is closed: give --output a file."),
        ("stdin", ["-", "OUT"], b"error: standard input is closed: give a file of requests."),
    ],
)
def test_a_closed_stream_that_the_job_needs_is_named(
    closed: str, arguments: list[str], message: bytes, source: Path, tmp_path: Path
) -> None:
    given = [{"IN": str(source), "OUT": str(tmp_path / "out")}.get(a, a) for a in arguments]
    done = run(f"sys.{closed} = None\n" + MAIN, *given, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert message in done.stderr
    assert b"Traceback" not in done.stderr


# ------------------------------------------------------------------------------------ late signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["while threads end", "in the last moment"])
def test_a_signal_after_the_work_changes_no_exit_status(number: int, when: str) -> None:
    code = f"""
import atexit, importlib.util, os, signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
found = importlib.util.spec_from_file_location("serve_batch", {str(SCRIPT)!r})
script = importlib.util.module_from_spec(found)
found.loader.exec_module(script)
class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number={int(number)}):
        kill(pid, number)  # modules are taken apart
def work():
    if {when!r} == "in the last moment":
        sys.last = Last()
    else:
        threading.Thread(target=end).start()
    return 3
def end():
    time.sleep(0.3)
    os.kill(os.getpid(), {int(number)})
    time.sleep(60)
script.main = work
script.run_as_program()
"""
    assert run(code).returncode == 3


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_while_a_continued_job_loads_says_where_the_answers_are(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(model: str, options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)

    source.write_text('{"prompt": "a"}\n' * 9 + '{"prompt": "crash"}\n')
    out = source.with_name("out")
    assert main(str(source), str(out), model="m", options={}) == 70
    monkeypatch.setattr(loading, "load", load)
    capsys.readouterr()
    assert main(str(source), str(out), model="m", options={}) == 75
    assert capsys.readouterr().err.endswith(
        f"interrupted. The answers so far are in {out}.partial; run the same command again to "
        "continue.\n"
    )


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_after_the_last_rename_sends_nobody_to_a_file_that_is_gone(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    publish = FileOutput.publish

    def interrupted(*given: Any, **how: Any) -> None:
        publish(*given, **how)
        raise KeyboardInterrupt

    out = source.with_name("out")
    with monkeypatch.context() as patch:
        patch.setattr(FileOutput, "publish", interrupted)
        assert main(str(source), str(out), model="m", options={}) == 75
    assert "interrupted. It was at its end; run the same command again" in capsys.readouterr().err
    assert main(str(source), str(out), model="m", options={}) == 3


# ------------------------------------------------------------------------------------- bad inputs


def test_a_check_names_damaged_packed_input(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(loading, "read_text", lambda *_: None)
    packed = gzip.compress(LINES.encode() * 1000)
    path = tmp_path / "in.gz"
    for damaged in (packed[:-20], packed[:-8] + b"12345678", packed[:3], packed + b"more"):
        path.write_bytes(damaged)
        assert main(str(path), None, model="m", options={}, check=True) == 2
        shown = capsys.readouterr().err
        assert f"error: cannot read the input {path}: " in shown
        assert shown.count(str(path)) == 1, shown


@pytest.mark.parametrize("suffix", ["", ".partial", ".partial.sorted", ".manifest.json", ".lock"])
def test_figures_take_no_name_that_the_job_needs(
    suffix: str, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = source.with_name("out")
    for path in (str(out) + suffix, str(source)):
        assert main(str(source), str(out), model="m", options={}, stats=path) == 2
        assert f"error: --stats {path} must be a file of its own" in capsys.readouterr().err
    assert os.listdir(source.parent) == ["in.jsonl"]
    assert source.read_text() == LINES


def test_what_cannot_be_removed_at_the_end_changes_no_result(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = files.remove

    def refuse(path: Path) -> None:
        if path.name.endswith(".input.new"):
            raise OSError(30, "Read-only file system")
        remove(path)

    monkeypatch.setattr(files, "remove", refuse)
    reader, writer = os.pipe()
    os.write(writer, LINES.encode())
    os.close(writer)
    out = tmp_path / "out"
    assert main(f"/dev/fd/{reader}", str(out), model="m", options={}) == 3
    os.close(reader)
    assert out.read_bytes().count(b"\n") == 3


def test_an_input_that_is_written_while_it_is_compared_is_noticed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def identify(model: str) -> dict[str, str]:
        with source.open("a") as file:
            file.write('{"prompt": "more"}\n')
        return {"name": model, "identity": model}

    def full(*_: object, **how: object) -> None:
        raise OSError(28, "No space left on device")

    out = str(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(FileOutput, "publish", full)
        assert main(str(source), out, model="m", options={}) == 75
    monkeypatch.setattr(loading, "identify", identify)
    assert main(str(source), out, model="m", options={}) == 75
    assert f"error: the input {source} was written while it was read" in capsys.readouterr().err


def test_an_input_that_cannot_be_read_to_its_end_is_no_trouble_of_the_output(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def broken(*_: object) -> Iterator[bytes]:
        yield b'{"prompt": "ab"}\n'
        raise OSError(5, "Input/output error")

    def load(model: str, options: Any) -> FakeLLM:
        monkeypatch.setattr("pagedjax.batch_job.source.read_lines", broken)
        return FakeLLM()

    monkeypatch.setattr(loading, "load", load)
    assert main(str(source), str(tmp_path / "out"), model="m", options={}) == 75
    shown = capsys.readouterr().err
    assert f"error: cannot read the input {source}: Input/output error. The answers so" in shown
