"""How the C++ kernels are built and loaded: by which compiler, under which key; what is refused."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

from pallas_kernels import cpu
from pallas_kernels.cpu import BuildError, Recipe, library

FAKE = """#!/bin/sh
for last; do :; done
case "$*" in
  *-dM*) {macros} ;;
  *) {build} ;;
esac
"""
MACROS = """echo '#define __VERSION__ "9.8"'; echo '#define __AVX__ 1'"""
BUILD = 'printf "%s" "$*" > "$last"'  # a library of the words it was called with


def write_compiler(path: Path, *, macros: str = MACROS, build: str = BUILD) -> Path:
    path.write_text(FAKE.format(macros=macros, build=build))
    path.chmod(0o700)
    return path


@pytest.fixture
def only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder that programs are looked for in; empty, and $CXX is not set."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return folder


def found() -> Recipe:
    recipe = cpu.find_recipe()
    assert recipe is not None
    return recipe


# ---------------------------------------------------------------------------------- the compiler


def test_without_a_compiler_there_is_no_recipe(only: Path) -> None:
    assert cpu.find_recipe() is None
    (only / "c++").write_text("not to be run")
    assert cpu.find_recipe() is None


def test_the_first_compiler_is_taken_that_the_machine_has(only: Path) -> None:
    for name in ("clang++", "g++", "c++"):
        write_compiler(only / name)
        assert found().command[0] == name
        assert found().compiler == f"{name} 9.8"


def test_cxx_names_the_compiler_and_its_arguments(
    only: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_compiler(only / "c++")
    mine = write_compiler(tmp_path / "my compiler")
    monkeypatch.setenv("CXX", f"'{mine}' -DNAME='two words'")
    recipe = found()
    assert recipe.command[:2] == (str(mine), "-DNAME=two words")
    assert recipe.compiler == "my compiler 9.8"
    called = recipe.build().decode()
    assert called.startswith("-DNAME=two words -std=c++17")
    assert {Path(word).name for word in called.split() if word.endswith(".cc")} == {
        path.name for path in Path(library.__file__).parent.glob("*.cc")
    }
    monkeypatch.setenv("CXX", "")
    assert found().command[0] == "c++"


@pytest.mark.parametrize("given", ["no-such-compiler", " ", "no-such-compiler -O3", 'c++ "'])
def test_a_cxx_that_cannot_be_run_is_not_replaced_in_silence(
    only: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    write_compiler(only / "c++")
    monkeypatch.setenv("CXX", given)
    assert cpu.find_recipe() is None


def test_a_compiler_that_does_not_know_this_processor_is_none(only: Path) -> None:
    write_compiler(only / "c++", macros="exit 1")
    assert cpu.find_recipe() is None


@pytest.mark.parametrize(
    ("machine", "option"),
    [("x86_64", "-march=native"), ("AMD64", "-march=native"), ("aarch64", "-mcpu=native")],
)
def test_the_code_is_for_the_processor_at_hand(
    only: Path, monkeypatch: pytest.MonkeyPatch, machine: str, option: str
) -> None:
    write_compiler(only / "c++")
    monkeypatch.setattr(library.platform, "machine", lambda: machine)
    assert option in found().command
    assert not any("fast-math" in word for word in found().command)


def test_a_compiler_that_fails_is_quoted(only: Path) -> None:
    write_compiler(only / "c++", build="echo 'no <atomic> here' >&2; exit 3")
    with pytest.raises(BuildError, match=r"c\+\+ ended with 3: no <atomic> here"):
        found().build()
    write_compiler(only / "c++", build="printf '%09999d' 7 >&2; exit 1")
    with pytest.raises(BuildError) as caught:
        found().build()
    assert len(str(caught.value)) < 500


def test_a_compiler_that_is_gone_or_never_ends_is_an_error(
    only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_compiler(only / "c++", build="exec /bin/sleep 60")
    recipe = found()
    monkeypatch.setattr(library, "_TIMEOUT", 0.2)
    with pytest.raises(BuildError, match=r"did not run: .*timed out"):
        recipe.build()
    (only / "c++").unlink()
    with pytest.raises(BuildError, match=r"c\+\+ did not run"):
        recipe.build()


def hanging_compiler(only: Path, told: Path) -> Recipe:
    """One that has a file and a child, both of which it tells, and waits for the child."""
    child = 'echo > "$TMPDIR/cc.s"; /bin/sleep 60 & echo "$! $TMPDIR" >'
    write_compiler(only / "c++", build=f"{child} '{told}'; wait")
    return found()


def assert_all_gone(told: Path) -> None:
    child, folder = told.read_text().split()
    assert not Path(folder).exists()
    until = time.monotonic() + 10.0
    while is_running(int(child)):
        assert time.monotonic() < until
        time.sleep(0.01)


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # it is gone by now, or this is macOS, whose init is quick
        return not Path("/proc").is_dir()
    return state not in "ZX"  # dead, and nobody has asked how


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_the_compiler_and_what_it_started(only: Path, tmp_path: Path) -> None:
    told = tmp_path / "told"
    recipe = hanging_compiler(only, told)
    main = threading.get_ident()

    def press() -> None:
        until = time.monotonic() + 60.0
        while not told.exists() or not told.read_text():
            if time.monotonic() > until:
                return
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        recipe.build()
    presser.join()
    assert_all_gone(told)


def test_a_compiler_that_never_ends_is_ended_in_any_thread(
    only: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    recipe = hanging_compiler(only, told)
    monkeypatch.setattr(library, "_TIMEOUT", 1.0)
    with ThreadPoolExecutor() as pool, pytest.raises(BuildError, match="timed out"):
        pool.submit(recipe.build).result()
    if told.exists():  # else it was ended before it had a child
        assert_all_gone(told)


def test_without_room_for_the_library_nothing_is_built(
    only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_compiler(only / "c++")
    monkeypatch.setattr(library.tempfile, "tempdir", "/nonexistent")
    with pytest.raises(BuildError, match=r"cannot be kept: .*/nonexistent"):
        found().build()


# --------------------------------------------------------------------------------------- the key


def test_a_key_is_the_same_each_time(only: Path) -> None:
    write_compiler(only / "c++")
    assert found() == found()
    assert len(found().key) == 64


def test_compiler_arguments_macros_and_versions_change_the_key(
    only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_compiler(only / "c++")
    keys = {found().key}
    monkeypatch.setenv("CXX", "c++ -O1")
    keys.add(found().key)
    monkeypatch.setenv("CXX", "c++")
    assert found().key in keys
    write_compiler(only / "c++", macros=MACROS + "; echo '#define __AVX512F__ 1'")
    keys.add(found().key)
    monkeypatch.setattr(jax, "__version__", "9.9")
    keys.add(found().key)
    assert len(keys) == 4


def test_any_source_changes_the_key_and_nothing_else_does(
    only: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_compiler(only / "c++")
    folder = tmp_path / "sources"
    shutil.copytree(library._FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    before = found().key
    monkeypatch.setattr(library, "_FOLDER", folder)
    assert found().key == before
    keys = {before}
    sources = [path for path in folder.iterdir() if path.suffix in (".cc", ".h")]
    assert {path.suffix for path in sources} == {".cc", ".h"}
    for path in sources:
        path.write_text(path.read_text() + "\n")
        keys.add(found().key)
    first = min(sources)
    first.rename(folder / f"a{first.suffix}")  # and still the first
    keys.add(found().key)
    assert len(keys) == len(sources) + 2
    (folder / "product.py").write_text("")
    (folder / "notes.txt").write_text("")
    assert found().key in keys


# --------------------------------------------------------------------------------------- loading

RECIPE = Recipe("fake 1", ("fake",), "0" * 64)


@pytest.mark.usefixtures("no_cpu_kernels")
@pytest.mark.parametrize("has_memfd", [True, False])
def test_what_is_no_library_is_refused_and_nothing_is_loaded(
    monkeypatch: pytest.MonkeyPatch, has_memfd: bool
) -> None:
    if not has_memfd:  # as on macOS
        monkeypatch.delattr(os, "memfd_create")
    for data in (b"", b"garbage", b"\x7fELF" + bytes(60)):
        with pytest.raises(BuildError, match="the compiled kernels cannot be loaded"):
            cpu.load(RECIPE, data)
        assert not cpu.is_loaded()
        assert cpu.loaded_key() == ""


@pytest.mark.usefixtures("cpu_kernels")
def test_what_is_loaded_stays_and_is_loaded_once() -> None:
    key = cpu.loaded_key()
    handle = library._loaded[key]
    cpu.load(dataclasses.replace(RECIPE, key=key), b"never looked at")
    with pytest.raises(BuildError, match="this process has loaded other kernels already"):
        cpu.load(RECIPE, b"whatever")
    assert library._loaded == {key: handle}
    assert cpu.is_loaded()
    assert cpu.loaded_key() == key


LOADS = """
import os, subprocess, sys, tempfile
from pagedjax import startup
from pallas_kernels import cpu
from pallas_kernels.cpu import BuildError
import jax.numpy as jnp

recipe = cpu.find_recipe()
kept = startup.open_store().read(recipe.key).payload
with tempfile.TemporaryDirectory() as folder:
    command = [recipe.command[0], "-shared", "-fPIC", "-x", "c++", os.devnull, "-o"]
    subprocess.run([*command, f"{folder}/empty.so"], check=True)
    empty = open(f"{folder}/empty.so", "rb").read()
if sys.argv[1] == "empty":
    try:
        cpu.load(recipe, empty)
    except BuildError as error:
        assert "cannot be loaded" in str(error)
    assert not cpu.is_loaded()
elif sys.argv[1] == "file":
    del os.memfd_create
cpu.load(recipe, kept)
assert cpu.loaded_key() == recipe.key
assert cpu.product(jnp.ones((2, 3)), jnp.ones((4, 3))).tolist() == [[3.0] * 4] * 2
"""


@pytest.mark.usefixtures("cpu_kernels")  # by which they are kept
@pytest.mark.parametrize(
    "way",
    ["memory", "file", "empty"],
)
def test_a_process_loads_what_is_kept(way: str) -> None:
    """From memory, from a file as on macOS, and after a library that has not what it should."""
    root = Path(__file__).parent.parent.parent
    subprocess.run([sys.executable, "-c", LOADS, way], cwd=root, check=True)
