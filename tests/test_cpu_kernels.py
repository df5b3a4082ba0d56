"""Whether a start uses its own kernels on a CPU, where it keeps them, and that it works without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagedjax import cpu_kernels, device
from pagedjax.program_store import Entry, ProgramStore
from pallas_kernels import cpu
from pallas_kernels.cpu import BuildError
from tests.tiny_checkpoint import tiny_checkpoint

ON_CPU = pytest.mark.skipif(device.platform() != "cpu", reason="how a CPU computes")


class Compiler:
    """A recipe that builds nothing but counts; and what was loaded of it."""

    compiler, key = "c++ 9.8", "k" * 64

    def __init__(self) -> None:
        self.built = 0
        self.loaded: list[bytes] = []
        self.error: BuildError | None = None

    def build(self) -> bytes:
        self.built += 1
        if self.error is not None:
            raise self.error
        return b"library"

    def load(self, recipe: Any, library: bytes) -> None:
        assert recipe is self
        self.loaded.append(library)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, no_cpu_kernels: None) -> Compiler:
    del no_cpu_kernels  # nothing is loaded yet
    compiler = Compiler()
    monkeypatch.delenv("PAGEDJAX_CPU_KERNELS", raising=False)
    monkeypatch.setattr(device, "platform", lambda: "cpu")
    monkeypatch.setattr(cpu, "find_recipe", lambda: compiler)
    monkeypatch.setattr(cpu, "load", compiler.load)
    return compiler


OWN = "own kernels, built by c++ 9.8"


def test_kernels_are_built_once_and_read_by_later_starts(
    compiler: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert cpu_kernels.prepare(ProgramStore(tmp_path)) == OWN
    assert compiler.built == 1
    assert compiler.loaded == [b"library"] * 3
    entry = ProgramStore(tmp_path).read(compiler.key)
    assert entry is not None
    assert (entry.name, entry.payload) == ("CPU kernels", b"library")
    assert not caplog.records


def test_kernels_of_another_recipe_are_not_read(compiler: Compiler, tmp_path: Path) -> None:
    cpu_kernels.prepare(ProgramStore(tmp_path))
    compiler.key = "l" * 64
    cpu_kernels.prepare(ProgramStore(tmp_path))
    assert compiler.built == 2


def test_damaged_kernels_are_built_anew_with_a_warning(
    compiler: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ProgramStore(tmp_path)
    cpu_kernels.prepare(store)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert cpu_kernels.prepare(store) == OWN
    assert compiler.built == 2
    assert "compiling anew, for" in caplog.text
    assert cpu_kernels.prepare(store) == OWN
    assert compiler.built == 2


def test_without_a_store_kernels_are_built_at_each_start(compiler: Compiler) -> None:
    for _ in range(2):
        assert cpu_kernels.prepare(None) == OWN
    assert compiler.built == 2


def test_what_is_loaded_is_not_loaded_again(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "is_loaded", lambda: True)
    monkeypatch.setattr(cpu, "loaded_compiler", lambda: compiler.compiler)
    for value in ("1", "0"):  # programs go on using them in any case
        monkeypatch.setenv("PAGEDJAX_CPU_KERNELS", value)
        assert cpu_kernels.prepare(None) == OWN
    assert (compiler.built, compiler.loaded) == (0, [])


def test_kept_kernels_that_cannot_be_loaded_are_built_anew(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def load(recipe: Any, library: bytes) -> None:
        if library != b"library":
            raise BuildError("that is no library")
        compiler.load(recipe, library)

    store = ProgramStore(tmp_path)
    store.write(compiler.key, Entry("CPU kernels", 1.0, b"garbage"))
    monkeypatch.setattr(cpu, "load", load)
    for _ in range(2):
        assert cpu_kernels.prepare(store) == OWN
    assert (compiler.built, compiler.loaded) == (1, [b"library"] * 2)
    assert caplog.text.count("building the CPU's kernels anew: that is no library") == 1


def test_kernels_that_cannot_be_loaded_are_not_kept(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load(*_: Any) -> None:
        raise BuildError("that is no library")

    monkeypatch.setattr(cpu, "load", load)
    answer = cpu_kernels.prepare(ProgramStore(tmp_path))
    assert answer == "XLA (c++ 9.8 cannot build faster ones)"
    assert not list(tmp_path.iterdir())


def test_a_failing_compiler_is_a_warning_with_its_words(
    compiler: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler.error = BuildError("c++ ended with 1: no <atomic> here")
    assert cpu_kernels.prepare(ProgramStore(tmp_path)) == "XLA (c++ 9.8 cannot build faster ones)"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "products are XLA's, and slower: c++ ended with 1: no <atomic> here" in caplog.text
    assert compiler.loaded == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "replacement", "answer"),
    [
        ("device.platform", lambda: "gpu", "XLA"),
        ("jax.local_device_count", lambda: 2, "XLA (the CPU is split into several devices)"),
        ("cpu.find_recipe", lambda: None, "XLA (there is no C++ compiler to build faster ones)"),
    ],
)
def test_where_there_can_be_no_kernels_nothing_is_built(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, name: str, replacement: Any, answer: str
) -> None:
    monkeypatch.setattr(f"pagedjax.cpu_kernels.{name}", replacement)
    assert cpu_kernels.prepare(None) == answer
    assert (compiler.built, compiler.loaded) == (0, [])


def test_a_variable_turns_them_off(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, is_on in (("0", False), ("1", True), ("", True)):
        monkeypatch.setenv("PAGEDJAX_CPU_KERNELS", value)
        answer = OWN if is_on else "XLA (PAGEDJAX_CPU_KERNELS is off)"
        assert cpu_kernels.prepare(None) == answer
    assert compiler.built == 2


# ------------------------------------------------------------------------------ whole processes

START = """
import json, logging, sys
logging.basicConfig(stream=sys.stderr)
from pagedjax import LLM, SamplingParams
from pallas_kernels import cpu
llm = LLM(
    sys.argv[1], max_model_len=64, max_num_seqs=2, max_num_batched_tokens=8, page_size=8,
    num_pages=20,
)
params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
answers = llm.generate([[5, 6, 7], [8] * 20, [9, 3] * 6], params, use_tqdm=False)
print(json.dumps({
    "products": llm.report.products,
    "attention": llm.report.attention,
    "is_loaded": cpu.is_loaded(),
    "tokens": [answer.outputs[0].token_ids for answer in answers],
}))
"""
WAYS = {  # name -> what the environment is told
    "own": {},
    "off": {"PAGEDJAX_CPU_KERNELS": "0"},
    "no compiler": {"PATH": "/nonexistent"},
    "failing": {"CXX": "failing"},
    "split": {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
}


def start(model: Path, told: dict[str, str]) -> subprocess.Popen[str]:
    dropped = {"CXX", "PAGEDJAX_CPU_KERNELS"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    root = Path(__file__).parent.parent
    return subprocess.Popen(
        [sys.executable, "-c", START, str(model)],
        env={**kept, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", **told},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def answers(
    cpu_kernels: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What a process says that started in each of `WAYS`, with its log."""
    del cpu_kernels  # can be built here
    folder = tmp_path_factory.mktemp("starts")
    model = tiny_checkpoint(folder / "model")
    failing = folder / "c++"
    failing.write_text('#!/bin/sh\ncase "$*" in *-dM*) ;; *) echo "no room" >&2; exit 7 ;; esac\n')
    failing.chmod(0o700)
    found = {}
    for way, told in WAYS.items():
        told = {name: str(failing) if value == "failing" else value for name, value in told.items()}
        process = start(model, told)
        output, log = process.communicate(timeout=300)
        assert process.returncode == 0, log
        found[way] = json.loads(output) | {"log": log}
    return found


@ON_CPU
def test_a_start_with_kernels_uses_them(answers: dict[str, Any]) -> None:
    own = answers["own"]
    assert own["products"].startswith("own kernels, built by ")
    assert own["attention"] == "native_cpu (the kernels for a CPU)"
    assert own["is_loaded"]


@ON_CPU
@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("off", "XLA (PAGEDJAX_CPU_KERNELS is off)"),
        ("no compiler", "XLA (there is no C++ compiler to build faster ones)"),
        ("failing", "XLA (c++ cannot build faster ones)"),
        ("split", "XLA (the CPU is split into several devices)"),
    ],
)
def test_a_start_without_kernels_says_why_and_answers_the_same(
    answers: dict[str, Any], way: str, why: str
) -> None:
    found = answers[way]
    assert found["products"] == why
    assert found["attention"] == "xla (the portable one; device is a CPU)"
    assert not found["is_loaded"]
    assert ("ended with 7: no room" in found["log"]) == (way == "failing")
    assert found["tokens"] == answers["own"]["tokens"]
    assert len(set(found["tokens"][0])) > 3  # else this could not fail
