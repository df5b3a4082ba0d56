"""The files of a batch job: killed at any call, on a full disk, continued, refused, locked."""

from __future__ import annotations

import errno
import fcntl
import gzip
import io
import json
import os
import random
import resource
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagedjax.batch_job import files, journal, loading, main, manifest, output
from pagedjax.batch_job.journal import recover
from tests.batch_fakes import FakeLLM
from tests.faulty_os import FaultyOs, Killed

PROMPTS = ["abcdefgh", "a", "bcd", "", "abcdefghijkl", "b", "vanish", "xy", "xyz", "q"]


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A fake in the place of the model; collects what was loaded."""
    loaded: list[str] = []

    def load(model: str, options: Any) -> FakeLLM:
        loaded.append(model)
        return FakeLLM()

    monkeypatch.setattr(loading, "load", load)
    monkeypatch.setattr(loading, "identify", lambda model: {"name": model, "identity": model})
    monkeypatch.setattr(journal, "SYNC_LINES", 3)
    monkeypatch.setattr(files, "os", FaultyOs())  # which has none, and does not wait for a disk
    monkeypatch.setattr(journal, "os", FaultyOs())
    return loaded


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Ten lines, two of which fail, and one that is blank."""
    path = tmp_path / "in.jsonl"
    rows = [json.dumps({"prompt": p, "custom_id": f"r{i}"}) for i, p in enumerate(PROMPTS)]
    path.write_text("\n".join([*rows[:5], "", *rows[5:]]) + "\n")
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "out.jsonl"


def job(source: Path | str, out: Path, *, seed: int = 0, model: str = "m", **how: Any) -> int:
    return main(str(source), str(out), model=model, options={"seed": seed}, **how)


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@contextmanager
def faults(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> Iterator[FaultyOs]:
    faulty = FaultyOs(*arguments)
    with monkeypatch.context() as patch:
        patch.setattr(files, "os", faulty)
        patch.setattr(journal, "os", faulty)
        try:
            yield faulty
        finally:
            faulty.bury()


def reference(source: Path, folder: Path, **how: Any) -> bytes:
    """The output of an uninterrupted run elsewhere."""
    folder.mkdir()
    assert job(source, folder / "ref.jsonl", **how) == 3
    return (folder / "ref.jsonl").read_bytes()


def same(got: bytes, wanted: bytes, ordered: bool) -> bool:
    """The same bytes, or the same lines where they come as they finish."""
    return got == wanted if ordered else sorted(got.splitlines()) == sorted(wanted.splitlines())


def forget(out: Path) -> None:
    for path in out.parent.iterdir():
        path.unlink()


# -------------------------------------------------------------------------------------- kills


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("overwrite", [True, False])
def test_a_kill_at_any_call_loses_and_repeats_nothing(
    ordered: bool, overwrite: bool, source: Path, out: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each changing call in turn is the last one; then the same command runs again, and is killed
    at a random call; then it runs to the end."""
    wanted = reference(source, tmp_path / "ref", ordered=ordered)
    rng = random.Random(7)
    how: dict[str, Any] = {"ordered": ordered, "overwrite": overwrite}
    with faults(monkeypatch) as counted:
        job(source, out, **how)
    assert len(counted.calls) > 25
    for at in range(len(counted.calls)):
        forget(out)
        if overwrite:  # another job's output is there
            assert job(source, out, seed=1) == 3
        for call in (at, rng.randrange(len(counted.calls))):
            with faults(monkeypatch, call) as faulty:
                try:
                    job(source, out, **how)
                except Killed:
                    assert len(faulty.calls) == call + 1
        assert job(source, out, **how) == 3, f"call {at}, {counted.calls[at]}"
        assert same(out.read_bytes(), wanted, ordered), f"call {at}, {counted.calls[at]}"
        left = {path.name for path in out.parent.iterdir()}
        assert left == {"out.jsonl", "out.jsonl.manifest.json"}


def test_answers_that_were_there_are_not_computed_again(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with faults(monkeypatch, 16), pytest.raises(Killed):
        job(source, out)
    before = recover(out.with_name("out.jsonl.partial"))
    assert 1 < before.answered + before.failed < 10
    whole = out.with_name("out.jsonl.partial").read_bytes()[: before.num_bytes]
    ids_before = {json.loads(line)["custom_id"] for line in whole.splitlines()}
    llm = FakeLLM()
    monkeypatch.setattr(loading, "load", lambda model, options: llm)
    assert job(source, out) == 3
    left = {f"r{i}" for i in range(10)} - ids_before
    assert len(llm.engine.added) == len(left - {"r3"})  # the empty prompt comes to no engine


def test_answers_that_are_all_there_need_no_model(
    source: Path, out: Path, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with faults(monkeypatch) as counted:
        job(source, out)
    forget(out)
    at = max(i for i, name in enumerate(counted.calls) if name == "replace")
    with faults(monkeypatch, at - 4), pytest.raises(Killed):
        job(source, out)
    loads.clear()
    assert not out.exists()
    assert job(source, out) == 3
    assert loads == []
    assert len(answers(out)) == 10


def test_a_kill_right_after_the_rename_costs_nothing(
    source: Path, out: Path, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with faults(monkeypatch) as counted:
        job(source, out)
    forget(out)
    renames = [i for i, name in enumerate(counted.calls) if name == "replace"]
    with faults(monkeypatch, renames[-2] + 1), pytest.raises(Killed):
        job(source, out)
    before = out.read_bytes()
    assert not manifest.read(output.manifest_of(str(out))).is_complete  # type: ignore[union-attr]
    loads.clear()
    assert job(source, out) == 3
    assert loads == []
    assert out.read_bytes() == before


def test_answers_of_a_job_that_was_overwritten_are_never_taken_for_this_one_s(
    source: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = reference(source, tmp_path / "ref", seed=1)
    plain = '{"prompt": "something else", "custom_id": "r0"}\n'
    other = tmp_path / "other.jsonl"
    other.write_text(plain)
    assert job(other, out) == 0
    with faults(monkeypatch, 18), pytest.raises(Killed):
        job(source, out, seed=1, overwrite=True)
    out.with_name("out.jsonl.partial").unlink()
    assert job(source, out, seed=1) == 3
    assert same(out.read_bytes(), wanted, ordered=False)


@pytest.mark.parametrize(
    "tail",
    [
        b"\x00" * 100,
        b'{"id": "batch_req_',
        b'{"id": "batch_req_0123456789abcdef0123456789abcdef", "custom_id": "z"}\n',
        b"not an answer\n",
        b'{"id": "batch_req_0123456789abcdef0123456789abcdef", "response": {"body": {}}}',
        b'{"id": "batch_req_0123456789abcdef0123456789abcdef", "response": {"bo\n',
    ],
)
def test_what_is_no_answer_is_cut_with_all_behind_it(
    tail: bytes, source: Path, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    wanted = reference(source, tmp_path / "ref", ordered=True)
    with faults(monkeypatch, 16), pytest.raises(Killed):
        job(source, out)
    partial = out.with_name("out.jsonl.partial")
    whole = partial.read_bytes()[: recover(partial).num_bytes]
    partial.write_bytes(whole + tail + whole[: whole.index(b"\n") + 1])
    num_cut = len(partial.read_bytes()) - len(whole)
    assert job(source, out, ordered=True) == 3
    assert out.read_bytes() == wanted
    assert f"{num_cut} bytes of a torn line were cut" in capsys.readouterr().err


def test_an_answer_without_its_line_end_is_torn(source: Path, out: Path) -> None:
    assert job(source, out) == 3
    data = out.read_bytes()
    out.write_bytes(data[:-1])
    found = recover(out)
    assert found.num_bytes == data.rindex(b"\n", 0, -1) + 1
    assert found.num_bytes + found.num_cut == len(data) - 1


def test_an_answer_that_is_there_twice_counts_once(source: Path, out: Path, tmp_path: Path) -> None:
    assert job(source, out) == 3
    path = tmp_path / "twice"
    lines = out.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], lines[0], *lines[3:]]))
    assert recover(path).num_bytes == len(b"".join(lines[:3]))


# -------------------------------------------------------------------------------------- trouble


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("ordered", [True, False])
def test_a_disk_that_fails_at_any_call_ends_cleanly(
    code: int, ordered: bool, source: Path, out: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    wanted = reference(source, tmp_path / "ref", ordered=ordered)
    with faults(monkeypatch) as counted:
        job(source, out, ordered=ordered)
    for at in range(len(counted.calls)):
        forget(out)
        capsys.readouterr()
        with faults(monkeypatch, at, OSError(code, os.strerror(code))):
            status = job(source, out, ordered=ordered)
        shown = capsys.readouterr().err
        assert "Traceback" not in shown
        # Only the lock's removal may fail unnoticed: it is taken over by the next run.
        last = at == len(counted.calls) - 1
        assert status == 3 if last else status in (2, 75), (at, counted.calls[at], shown)
        if not last:
            assert f"cannot write the output {out}: {os.strerror(code)}" in shown or (
                f"cannot write {out}: {os.strerror(code)}" in shown
            )
        if counted.calls[at] in ("write", "fsync"):
            assert not out.with_name("out.jsonl.partial.sorted").exists(), "it would take room"
        assert job(source, out, ordered=ordered) == 3
        assert same(out.read_bytes(), wanted, ordered)


def test_a_full_disk_leaves_whole_lines_and_is_continued(
    source: Path, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = reference(source, tmp_path / "ref", ordered=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))
    try:
        assert job(source, out, ordered=True) == 75
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    shown = capsys.readouterr().err
    assert f"cannot write {out}: {os.strerror(errno.EFBIG)}" in shown
    assert "run the same command again to continue" in shown
    partial = out.with_name("out.jsonl.partial").read_bytes()
    assert 0 < len(partial) <= 1500
    assert partial.endswith(b"}\n")
    assert job(source, out, ordered=True) == 3
    assert out.read_bytes() == wanted


def test_a_folder_that_cannot_be_written_starts_nothing(
    source: Path, loads: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    is_root = os.geteuid() == 0  # who may write everywhere, so that this must be somebody else
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy = Path(shutil.copy(source, folder))
        folder.chmod(0o555)
        if is_root:
            os.seteuid(65534)
        try:
            assert job(copy, folder / "out.jsonl") == 2
        finally:
            if is_root:
                os.seteuid(0)
            folder.chmod(0o755)
        assert os.listdir(folder) == [copy.name]
    shown = capsys.readouterr().err
    assert f"cannot write the output {folder / 'out.jsonl'}: Permission denied" in shown
    assert not loads


@pytest.mark.parametrize("more", [" ", '{"prompt": "more"}\n'])
def test_an_input_that_is_written_meanwhile_is_noticed(
    more: str, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def load(model: str, options: Any) -> FakeLLM:
        with source.open("a") as file:
            file.write(more)
        return FakeLLM()

    monkeypatch.setattr(loading, "load", load)
    assert job(source, out) == 75
    assert not out.exists()
    assert "was written while it was read" in capsys.readouterr().err
    assert job(source, out) == 2, "it is another input now"


def test_an_answer_that_belongs_to_no_line_is_noticed(
    source: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "stranger", "custom_id": "s"}\n')
    assert job(other, tmp_path / "strange.jsonl") == 0
    interrupt(source, out, monkeypatch)
    partial = out.with_name("out.jsonl.partial")
    whole = partial.read_bytes()[: recover(partial).num_bytes]
    partial.write_bytes(whole + (tmp_path / "strange.jsonl").read_bytes())
    assert job(source, out) == 70
    assert f"error: {partial} must hold one answer for each line" in capsys.readouterr().err
    partial.unlink()
    assert job(source, out) == 3
    assert len(answers(out)) == 10


def test_an_output_that_is_a_link_stays_one(source: Path, out: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.jsonl"
    link.symlink_to(out)
    assert job(source, link) == 3
    assert link.is_symlink()
    assert len(answers(out)) == 10


# ------------------------------------------------------------------------------------ same job?


def interrupt(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, **how: Any) -> None:
    with faults(monkeypatch, 16), pytest.raises(Killed):
        job(source, out, **how)


@pytest.mark.parametrize("is_done", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("input", r"the input (11 lines then, 12 now)"),
        ("seed", "seed (0 then, 1 now)"),
        ("model", "the model (m then, other now)"),
        ("request_timeout", "request_timeout (None then, 5.0 now)"),
        ("version", "the version of pagedjax (0.0.1 then"),
    ],
)
def test_another_job_is_refused_and_nothing_is_touched(
    change: str, message: str, is_done: bool, source: Path, out: Path, loads: list[str],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if is_done:
        assert job(source, out) == 3
    else:
        interrupt(source, out, monkeypatch)
    how: dict[str, Any] = {}
    if change == "input":
        source.write_bytes(source.read_bytes() + b'{"prompt": "new"}\n')
    elif change == "version":
        path = output.manifest_of(str(out))
        path.write_text(path.read_text().replace(manifest.__version__, "0.0.1"))
    else:
        how = {change: {"seed": 1, "model": "other", "request_timeout": 5.0}[change]}
    before = {path: path.read_bytes() for path in out.parent.iterdir()}
    before.pop(out.with_name("out.jsonl.lock"), None)
    loads.clear()
    assert job(source, out, **how) == 2
    shown = capsys.readouterr().err
    assert f"error: {out} belongs to another job: {message}" in shown
    assert "or --overwrite to begin anew" in shown
    assert {path: path.read_bytes() for path in out.parent.iterdir()} == before
    assert not loads
    assert job(source, out, **how, overwrite=True) == 3
    assert len(answers(out)) == 10 + (change == "input")


def flip_a_letter(data: bytes) -> bytes:
    return data.replace(b"abcdefgh", b"abcdefgi", 1)


def drop_a_line(data: bytes) -> bytes:
    return data[data.index(b"\n") + 1 :]


def turn_two_lines(data: bytes) -> bytes:
    first, second, *others = data.splitlines(keepends=True)
    return b"".join([second, first, *others])


@pytest.mark.parametrize("is_done", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flip_a_letter, "the input (other text in its 11 lines)"),
        (drop_a_line, "the input (11 lines then, 10 now)"),
        (turn_two_lines, "the input (other text in its 11 lines)"),
        (lambda data: gzip.compress(flip_a_letter(data)), "the input (other text in its 11 lines)"),
        (lambda data: b"", "the input (11 lines then, 0 now)"),
    ],
    ids=["byte", "line", "order", "packed", "empty"],
)
def test_an_input_that_changed_under_its_name_is_refused(
    change: Any, message: str, is_done: bool, source: Path, out: Path, loads: list[str],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    data = source.read_bytes()
    if is_done:
        assert job(source, out) == 3
    else:
        interrupt(source, out, monkeypatch)
    source.write_bytes(change(data))
    before = {path: path.read_bytes() for path in out.parent.iterdir() if path.suffix != ".lock"}
    loads.clear()
    assert job(source, out) == 2
    assert f"error: {out} belongs to another job: {message}. " in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.parent.iterdir()} == before
    assert not loads
    source.write_bytes(data)  # and with what it was, the job goes on
    assert job(source, out) == 3
    assert len(answers(out)) == 10


def test_a_changed_input_is_answered_anew_where_that_is_asked_for(
    source: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(source, out, monkeypatch, ordered=True)
    source.write_bytes(flip_a_letter(source.read_bytes()))
    wanted = reference(source, tmp_path / "ref", ordered=True)
    assert job(source, out, ordered=True, overwrite=True) == 3
    assert out.read_bytes() == wanted


@pytest.mark.parametrize("unpack", [True, False])
def test_an_input_may_be_packed_or_unpacked_between_two_runs(
    unpack: bool, source: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    wanted = reference(source, tmp_path / "ref", ordered=True)
    forms = [source.read_bytes(), gzip.compress(source.read_bytes())]
    source.write_bytes(forms[unpack])
    interrupt(source, out, monkeypatch, ordered=True)
    source.write_bytes(forms[not unpack])
    assert job(source, out, ordered=True) == 3
    assert "continuing " in capsys.readouterr().err
    assert out.read_bytes() == wanted


def test_sizes_and_memory_may_change_between_runs(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(source, out, monkeypatch)
    options = {"seed": 0, "max_num_seqs": 2, "num_pages": 99, "swap_space": 1.0}
    assert main(str(source), str(out), model="m", options=options, max_inflight=1) == 3


def test_sizes_of_steps_may_not_change_where_bits_are_promised(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"batch_invariant": True, "max_num_seqs": 4}
    with faults(monkeypatch, 16), pytest.raises(Killed):
        main(str(source), str(out), model="m", options=options)
    options["max_num_seqs"] = 8
    assert main(str(source), str(out), model="m", options=options) == 2
    assert "max_num_seqs (4 then, 8 now)" in capsys.readouterr().err


def test_a_job_that_is_done_is_not_done_again(
    source: Path, out: Path, loads: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert job(source, out) == 3
    before = out.read_bytes()
    loads.clear()
    assert job(source, out) == 3
    assert not loads
    assert f"{out} is complete: 8 answered, 2 failed" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert job(source, out, overwrite=True) == 3
    assert loads == ["m"]


def test_an_output_that_was_taken_away_is_made_again(
    source: Path, out: Path, loads: list[str]
) -> None:
    assert job(source, out) == 3
    out.unlink()
    assert job(source, out) == 3
    assert len(answers(out)) == 10


def test_a_begun_job_is_continued_in_spite_of_overwrite(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(source, out, monkeypatch)
    assert job(source, out, overwrite=True) == 3
    assert "continuing " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.partial"])
def test_a_file_of_unknown_origin_is_refused(
    name: str, source: Path, out: Path, loads: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = out.with_name(name)
    path.write_text("somebody's thesis\n")
    assert job(source, out) == 2
    assert "nothing says which job it holds answers of" in capsys.readouterr().err
    assert path.read_text() == "somebody's thesis\n"
    assert not loads
    assert job(source, out, overwrite=True) == 3


def test_an_empty_output_is_no_output(source: Path, out: Path) -> None:
    out.touch()  # as mktemp makes it
    assert job(source, out) == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 2}',
        "\x00",
        '{"format": 1}',
        '{"format": 1, "input": {"lines": "1"}, "model": 1, "parameters": {}, "version": "", '
        '"is_complete": true, "last_run": {}}',
    ],
)
def test_a_damaged_manifest_is_named(
    text: str, source: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job(source, out) == 3
    output.manifest_of(str(out)).write_text(text)  # an empty one was torn by the file system
    assert job(source, out) == 2
    assert "out.jsonl.manifest.json is not a manifest of this program" in capsys.readouterr().err
    assert job(source, out, overwrite=True) == 3


# ----------------------------------------------------------------------------------------- locks


def test_two_runs_are_kept_apart(
    source: Path, out: Path, loads: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    lock = out.with_name("out.jsonl.lock")
    with lock.open("w") as file:
        file.write("4711\n")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        assert job(source, out) == 2
        assert f"the output {out} is in use by process 4711." in capsys.readouterr().err
        assert not loads
    assert job(source, out) == 3, "a lock file that nobody holds is no hindrance"
    assert not lock.exists()


@pytest.mark.usefixtures("ctrl_c")
def test_a_signal_while_the_lock_is_taken_leaves_no_lock_file(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = files.append

    def interrupted(descriptor: int, data: bytes) -> None:
        append(descriptor, data)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(files, "append", interrupted)
        assert job(source, out) == 75
    assert not list(out.parent.glob("*.lock"))
    assert job(source, out) == 3


def test_a_lock_file_that_its_holder_just_removed_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    path.touch()
    taken: list[int] = []

    def flock(descriptor: int, how: int) -> None:
        if not taken:
            path.unlink()  # between our opening it and locking it
        taken.append(descriptor)
        fcntl.flock(descriptor, how)

    monkeypatch.setattr(files, "fcntl", SimpleNamespace(**vars(fcntl) | {"flock": flock}))
    with files.locked(path):
        assert len(taken) == 2
        with pytest.raises(files.Locked), files.locked(path):
            pass


def test_a_file_system_without_locks_is_warned_of(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    assert job(source, out) == 3
    assert "has no locks: do not run two jobs for one output" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------- input


class Pipe:
    """A pipe with these bytes in it, as a path."""

    def __init__(self, data: bytes) -> None:
        self._reading, writing = os.pipe()
        os.write(writing, data)
        os.close(writing)

    def __enter__(self) -> str:
        return f"/dev/fd/{self._reading}"

    def __exit__(self, *_: object) -> None:
        os.close(self._reading)


def test_what_came_through_a_pipe_is_kept_until_the_job_is_done(
    source: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    wanted = reference(source, tmp_path / "ref", ordered=True)
    kept = out.with_name("out.jsonl.input")
    data = source.read_bytes()
    with Pipe(data) as path:
        interrupt(Path(path), out, monkeypatch)
    assert kept.read_bytes() == data
    with Pipe(data + b'{"prompt": "more"}\n') as path:
        assert job(path, out) == 2
    assert "the input (11 lines then, 12 now)" in capsys.readouterr().err
    assert kept.read_bytes() == data, "another input leaves it as it is"
    with Pipe(b"") as path:
        assert job(path, out, ordered=True) == 3
    assert out.read_bytes() == wanted
    assert sorted(os.listdir(out.parent)) == ["out.jsonl", "out.jsonl.manifest.json"]
    with Pipe(data) as path:
        assert job(path, out) == 3
    assert "is complete" in capsys.readouterr().err
    assert sorted(os.listdir(out.parent)) == ["out.jsonl", "out.jsonl.manifest.json"]


@pytest.mark.parametrize("through_pipe", [True, False])
def test_packed_input_is_the_same_input(through_pipe: bool, source: Path, out: Path) -> None:
    packed = source.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(source.read_bytes()))
    if through_pipe:
        with Pipe(packed.read_bytes()) as path:
            assert job(path, out) == 3
    else:
        assert job(packed, out) == 3
    assert len(answers(out)) == 10
    assert job(source, out) == 3, "packed or not, it is one job"


@pytest.mark.parametrize("spoil", [lambda d: d[:-9], lambda d: d[:60] + b"\xff" * 9 + d[69:]])
def test_damaged_packed_input_starts_nothing(
    spoil: Any, source: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = source.with_suffix(".jsonl.gz")
    packed.write_bytes(spoil(gzip.compress(source.read_bytes())))
    assert job(packed, out) == 2
    assert f"cannot read the input {packed}: " in capsys.readouterr().err
    assert not list(out.parent.iterdir())


def test_standard_input_is_a_dash(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Pipe(source.read_bytes()) as path, open(path, "rb") as file:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(file))
        assert job("-", out) == 3
    assert len(answers(out)) == 10
