"""Where compiled programs are kept, as the environment says it, and where it cannot say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedjax import environment, program_store, startup


@pytest.fixture(autouse=True)
def only_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other variable says where."""
    monkeypatch.delenv("PAGEDJAX_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def opened() -> Path | None:
    folder = environment.read().cache_dir
    return None if folder is None else program_store.open_folder(folder)


def test_the_nearest_variable_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened() == tmp_path / ".cache/pagedjax"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert opened() == tmp_path / "xdg/pagedjax"
    monkeypatch.setenv("PAGEDJAX_CACHE_DIR", "~/mine")
    assert opened() == tmp_path / "mine"
    monkeypatch.setenv("PAGEDJAX_CACHE_DIR", "")
    assert opened() is None


@pytest.mark.usefixtures("no_home")
@pytest.mark.parametrize("given", [None, "~", "~no-such-user/x"])
def test_without_a_home_nothing_is_kept_and_a_warning_says_what_to_set(
    given: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if given is not None:
        monkeypatch.setenv("PAGEDJAX_CACHE_DIR", given)
    assert startup.open_store() is None
    folder = given or "~/.cache/pagedjax"
    assert caplog.messages == [
        f"not keeping compiled programs: no home directory for {folder} is known; "
        f"set PAGEDJAX_CACHE_DIR to a folder"
    ]


@pytest.mark.usefixtures("no_home")
def test_without_a_home_what_needs_none_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert opened() == tmp_path / "pagedjax"
    monkeypatch.setenv("PAGEDJAX_CACHE_DIR", str(tmp_path / "kept"))
    assert startup.open_store() is not None
    assert not caplog.messages
