"""Programs: compiled together, kept whole, read instead of traced, in doubt compiled anew."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from pagedjax import programs as programs_module
from pagedjax.errors import IntegrityError
from pagedjax.program_store import ProgramStore
from pagedjax.programs import CompiledProgram, Countdown, Handle, Program, ProgramSet

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
TRACE_EVENT = "/jax/core/compile/jaxpr_trace_duration"
F32 = jax.ShapeDtypeStruct((64,), jnp.float32)


@pytest.fixture(autouse=True)
def _without_jaxs_cache() -> Iterator[None]:
    """What JAX keeps by itself would be found where these tests expect that something compiles."""
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts JAX's compilations and traces meanwhile, in any thread."""
    count: Counter[str] = Counter()

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        del duration_secs
        count.update({COMPILE_EVENT: ["compiled"], TRACE_EVENT: ["traced"]}.get(event, []))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def step(scale: float, state: dict[str, jax.Array], x: jax.Array) -> Any:
    """Donates the state; one product, a constant and a loop."""
    table = jnp.asarray(np.arange(64, dtype=np.float32))
    y = jax.lax.fori_loop(0, 3, lambda _, y: jnp.sin(y) * scale + table, x)
    return {"sum": state["sum"] + y}, (y, y.sum())


def program(scale: float = 2.0, *, is_known: bool = True, name: str = "") -> Program:
    return Program(
        name=name or f"step {scale}",
        function=functools.partial(step, scale),
        holds=f"{scale}" if is_known else None,
        arguments=({"sum": F32}, F32),
        result=({"sum": 0}, (0, 0)),
        donated=(0,),
    )


def run(call: Any) -> tuple[np.ndarray, np.ndarray]:
    state = {"sum": jnp.ones((64,), jnp.float32)}
    pointer = state["sum"].unsafe_buffer_pointer()
    new, (y, total) = call(state, jnp.arange(64, dtype=jnp.float32))
    assert state["sum"].is_deleted()
    assert new["sum"].unsafe_buffer_pointer() == pointer
    return np.asarray(y), np.asarray(total)


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.program"))


@pytest.mark.parametrize("is_known", [True, False])
def test_a_second_set_reads_what_the_first_one_compiled(tmp_path: Path, is_known: bool) -> None:
    asked = {scale: program(scale, is_known=is_known) for scale in (2.0, 3.0)}
    first = ProgramSet(ProgramStore(tmp_path))
    with counted() as count:
        expected = {scale: run(call) for scale, call in first.compile(asked).items()}
    assert count["compiled"] >= 2
    assert [it.is_kept for it in first.log] == [False, False]
    assert len(kept(tmp_path)) == 2
    jax.clear_caches()
    second = ProgramSet(ProgramStore(tmp_path))
    with counted() as count:
        calls = second.compile(asked)
    assert count["compiled"] == 0
    assert (count["traced"] == 0) == is_known
    assert [it.is_kept for it in second.log] == [True, True]
    assert {it.name: round(it.seconds, 3) for it in first.log} == {
        it.name: it.seconds for it in second.log
    }
    for scale, call in calls.items():
        for old, new in zip(expected[scale], run(call), strict=True):
            np.testing.assert_array_equal(old, new)


def test_another_constant_of_unknown_code_is_another_program(tmp_path: Path) -> None:
    ProgramSet(ProgramStore(tmp_path)).compile({0: program(2.0, is_known=False, name="same")})
    other = ProgramSet(ProgramStore(tmp_path))
    calls = other.compile({0: program(4.0, is_known=False, name="same")})
    assert not other.log[0].is_kept
    without = ProgramSet().compile({0: program(4.0)})
    np.testing.assert_array_equal(run(calls[0])[0], run(without[0])[0])


def test_without_a_store_nothing_is_kept(tmp_path: Path) -> None:
    compiling = ProgramSet()
    run(compiling.compile({0: program()})[0])
    assert not compiling.log[0].is_kept
    assert not list(tmp_path.iterdir())


def test_every_program_is_told_as_it_is_ready(tmp_path: Path) -> None:
    told: list[tuple[CompiledProgram, int, int]] = []
    asked = {i: program(float(i)) for i in range(3)}
    ProgramSet(ProgramStore(tmp_path)).compile({0: asked[0]})
    ProgramSet(ProgramStore(tmp_path)).compile(asked, lambda *each: told.append(each))
    assert [(done, total) for _, done, total in told] == [(1, 3), (2, 3), (3, 3)]
    assert [told[0][0].name, told[0][0].is_kept] == ["step 0.0", True]
    assert {it.name for it, *_ in told} == {"step 0.0", "step 1.0", "step 2.0"}
    assert str(told[0][0]).startswith("step 0.0: kept from an earlier start, ")


def test_bytes_that_are_no_executable_are_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The entry is whole, but XLA does not take it: another build of it, say."""
    with monkeypatch.context() as patch:
        patch.setattr(programs_module, "_serialize", lambda compiled: b"no executable")
        expected = run(ProgramSet(ProgramStore(tmp_path)).compile({0: program()})[0])
    again = ProgramSet(ProgramStore(tmp_path))
    calls = again.compile({0: program()})
    np.testing.assert_array_equal(run(calls[0])[0], expected[0])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "compiling step 2.0 anew" in caplog.text
    assert [it.is_kept for it in again.log] == [False]
    third = ProgramSet(ProgramStore(tmp_path))  # what was compiled took its place
    run(third.compile({0: program()})[0])
    assert [it.is_kept for it in third.log] == [True]


def test_an_entry_that_is_cut_is_compiled_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ProgramSet(ProgramStore(tmp_path)).compile({0: program()})
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    again = ProgramSet(ProgramStore(tmp_path))
    run(again.compile({0: program()})[0])
    assert not again.log[0].is_kept
    assert "its checksum is wrong" in caplog.text


def test_what_cannot_be_written_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(compiled: Any) -> Any:
        raise ValueError("Compilation does not support serialization")

    monkeypatch.setattr(programs_module.serialize_executable, "serialize", refuse)
    run(ProgramSet(ProgramStore(tmp_path)).compile({0: program()})[0])
    assert not kept(tmp_path)


def test_what_jax_keeps_in_its_own_cache_is_not_kept_twice(tmp_path: Path) -> None:
    """Written a second time, an executable of the CPU client lacks some of its functions."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    compilation_cache.reset_cache()
    run(ProgramSet(ProgramStore(tmp_path)).compile({0: program()})[0])
    assert not kept(tmp_path)
    jax.config.update("jax_compilation_cache_dir", None)
    run(ProgramSet(ProgramStore(tmp_path)).compile({0: program()})[0])
    assert len(kept(tmp_path)) == 1


def test_only_what_is_first_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {i: program(float(i)) for i in range(4)}
    ProgramSet(ProgramStore(tmp_path)).compile(asked)
    may_read, read = threading.Event(), list[tuple[str, str]]()
    original = programs_module._deserialize

    def slow(payload: bytes, it: Program) -> Any:
        thread = threading.current_thread()
        if thread.name == "pagedjax-programs":
            assert may_read.wait(60)
        read.append((it.name, "later" if thread.name == "pagedjax-programs" else "now"))
        return original(payload, it)

    monkeypatch.setattr(programs_module, "_deserialize", slow)
    warm = ProgramSet(ProgramStore(tmp_path))
    calls = warm.compile(asked, first=[1])
    assert read == [("step 1.0", "now")]
    assert len(warm.log) == 4
    run(calls[3])  # what is called is read by who calls it
    assert read[1:] == [("step 3.0", "now")]
    may_read.set()
    warm.wait()
    assert read[2:] == [("step 0.0", "later"), ("step 2.0", "later")]
    for call in calls.values():
        run(call)
    assert len(read) == 4


def test_a_handle_reads_once_however_many_call() -> None:
    count: Counter[str] = Counter()
    together = threading.Barrier(4)
    compiled: Any = lambda x: x + 1  # noqa: E731

    def load() -> Any:
        count["loaded"] += 1
        return compiled

    handle, seen = Handle(load, was_kept=True), list[int]()

    def call() -> None:
        together.wait()
        seen.append(handle(1))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [2, 2, 2, 2]
    assert count["loaded"] == 1


def test_an_error_while_compiling_is_raised_and_nothing_is_kept(tmp_path: Path) -> None:
    def broken(x: jax.Array) -> jax.Array:
        raise ZeroDivisionError

    wrong = Program(name="x", function=broken, holds="", arguments=(F32,), result=0)
    with pytest.raises(ZeroDivisionError):
        ProgramSet(ProgramStore(tmp_path)).compile({0: program(), 1: wrong})
    assert len(kept(tmp_path)) <= 1


def test_a_result_of_another_structure_is_a_bug_that_is_told(tmp_path: Path) -> None:
    wrong = Program(
        name="x", function=lambda x: (x, x), holds="", arguments=(F32,), result=(0, (0,))
    )
    with pytest.raises(IntegrityError, match="`result` of the program 'x' has another structure"):
        ProgramSet(ProgramStore(tmp_path)).compile({0: wrong})
    assert not kept(tmp_path)


def test_the_countdown_says_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 12.04])
    monkeypatch.setattr(programs_module.time, "monotonic", lambda: next(times))
    countdown = Countdown()
    new, old = CompiledProgram("a", 3.96, is_kept=False), CompiledProgram("b", 1.0, is_kept=True)
    assert countdown.line(old, 1, 5) is None
    assert countdown.line(new, 2, 5) == "a: compiled, 4.0 s (2 of 5, at most 12 s to go)"
    assert countdown.line(new, 3, 5) == "a: compiled, 4.0 s (3 of 5, at most 6 s to go)"
    times = iter([20.0])
    assert countdown.line(new, 5, 5) == "a: compiled, 4.0 s (5 of 5)"
