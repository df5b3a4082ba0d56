"""The program store: whole entries or none, of this user's alone, and not more than it may hold."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedjax import program_store
from pagedjax.program_store import Entry, ProgramStore, open_folder

ENTRY = Entry("decoding 8 tokens", 2.5, bytes(range(256)) * 40)


def file_of(folder: Path, key: str = "a") -> Path:
    return folder / f"{key}.program"


def test_an_entry_comes_back_as_it_was(tmp_path: Path) -> None:
    ProgramStore(tmp_path).write("a", ENTRY)
    assert ProgramStore(tmp_path).read("a") == ENTRY
    assert [path.name for path in tmp_path.iterdir()] == ["a.program"]
    assert file_of(tmp_path).stat().st_mode & 0o077 == 0


def test_what_was_never_written_is_not_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert ProgramStore(tmp_path).read("a") is None
    assert not caplog.records


def test_no_cut_and_no_changed_byte_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ProgramStore(tmp_path)
    store.write("a", ENTRY)
    whole = file_of(tmp_path).read_bytes()
    name_at = whole.index(b"decoding")
    for length in range(len(whole)):
        file_of(tmp_path).write_bytes(whole[:length])
        assert store.read("a") is None, length
    for at in range(len(whole)):
        file_of(tmp_path).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        entry = store.read("a")  # what is for people only has no checksum
        assert entry is None or (entry.payload == ENTRY.payload and at > name_at - 12), at
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert "compiling anew, for" in caplog.text
    assert "damaged" in caplog.text


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{}",
        b'{"key": "a", "sha256": 1}',
        b'{"key": "a", "sha256": 1, "name": "", "seconds": 1' + b"0" * 400 + b"}",
        b"\xff",
        b"9" * 5000,
        b"[" * 4000,
    ],
)
def test_a_strange_header_is_no_entry(tmp_path: Path, header: bytes) -> None:
    file_of(tmp_path).write_bytes(b"pagedjax program 2\n" + header + b"\nbody")
    file_of(tmp_path).chmod(0o600)
    assert ProgramStore(tmp_path).read("a") is None


def test_a_program_under_the_name_of_another_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both may take the same shapes: nothing but the key tells them apart."""
    store = ProgramStore(tmp_path)
    store.write("a", ENTRY)
    store.write("b", ENTRY)
    file_of(tmp_path, "a").rename(file_of(tmp_path, "b"))
    assert store.read("b") is None
    assert "another program" in caplog.text
    file_of(tmp_path, "b").rename(file_of(tmp_path, "a"))
    assert store.read("a") == ENTRY


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_no_entry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[..., None]
) -> None:
    """A pipe would never end, and a folder cannot be read."""
    make(file_of(tmp_path), 0o700)
    assert ProgramStore(tmp_path).read("a") is None
    assert "it is no file" in caplog.text


def test_what_others_may_write_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = ProgramStore(tmp_path)
    store.write("a", ENTRY)
    for mode in (0o620, 0o602):
        file_of(tmp_path).chmod(mode)
        assert store.read("a") is None
    assert "others may write" in caplog.text
    file_of(tmp_path).chmod(0o600)
    assert store.read("a") == ENTRY
    uid = os.getuid()
    monkeypatch.setattr(program_store.os, "getuid", lambda: uid + 1)
    assert store.read("a") is None
    assert "belongs to another user" in caplog.text


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    ProgramStore(tmp_path).write("a", ENTRY)
    file_of(tmp_path, "b").symlink_to(file_of(tmp_path, "a"))
    assert ProgramStore(tmp_path).read("b") is None


def test_a_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "deep" / "er")
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o770)
    assert open_folder(tmp_path) is None
    assert "`chmod go-w` it" in caplog.text
    tmp_path.chmod(0o700)
    assert open_folder(tmp_path) == tmp_path
    (tmp_path / "file").write_text("")
    assert open_folder(tmp_path / "file" / "folder") is None
    uid = os.getuid()
    monkeypatch.setattr(program_store.os, "getuid", lambda: uid + 1)
    assert open_folder(tmp_path) is None
    assert "belongs to another user" in caplog.text


def test_what_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ProgramStore(tmp_path / "gone")
    store.write("a", ENTRY)
    assert "not keeping a compiled program" in caplog.text
    assert store.read("a") is None


def test_the_least_recently_used_entries_go_first(tmp_path: Path) -> None:
    size = 2 * 10_000  # incompressible, so about this long in the file
    store = ProgramStore(tmp_path, max_bytes=3 * size + 2000)
    for i, key in enumerate("abc"):
        store.write(key, Entry(key, 1.0, os.urandom(size)))
        os.utime(file_of(tmp_path, key), (i, i))
    assert store.read("a") is not None  # now the most recently used
    store.write("d", Entry("d", 1.0, os.urandom(size)))
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["a", "c", "d"]


def test_the_newest_entry_stays_however_large_it_is(tmp_path: Path) -> None:
    store = ProgramStore(tmp_path, max_bytes=10)
    store.write("a", ENTRY)
    store.write("b", ENTRY)
    assert [path.stem for path in tmp_path.iterdir()] == ["b"]


def test_what_a_killed_writer_left_goes_after_an_hour(tmp_path: Path) -> None:
    old, new = tmp_path / "aold.tmp", tmp_path / "anew.tmp"
    old.write_text("")
    new.write_text("")
    os.utime(old, (1, 1))
    ProgramStore(tmp_path).write("a", ENTRY)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.program", "anew.tmp"]


def test_writers_at_once_never_show_half_an_entry(tmp_path: Path) -> None:
    entries = [Entry(str(i), 1.0, os.urandom(200_000)) for i in range(4)]
    store = ProgramStore(tmp_path)
    store.write("a", entries[0])
    writers = [
        threading.Thread(target=lambda e=e: [store.write("a", e) for _ in range(10)])
        for e in entries
    ]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        assert store.read("a") in entries
        seen += 1
    assert seen > 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.program"]
