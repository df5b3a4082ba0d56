"""Programs: functions of fixed shapes, compiled ahead of time. The only file with `jax.jit`.

Owns how they are lowered, how several are compiled at once, how they are kept from one start to
the next, and the record of what each took. Knows nothing of what they compute; the runner says
which there are.

**Kept programs.** What a program is made of gives a key (see `program_key`); a store may have an
executable by that key. Then nothing is traced and nothing compiles: it is read, which still takes
a second for a large one, so all but the first ones are read in the background, or when they are
called. Of a function whose code is not known (a user's model), the key is of what it was lowered
to: it is traced at each start, and not compiled again.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import as_completed
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import serialize_executable

from pagedjax import program_key, threads
from pagedjax.errors import IntegrityError
from pagedjax.program_store import Entry, ProgramStore

logger = logging.getLogger("pagedjax")

MAX_THREADS = 8  # XLA compiles one program mostly on one thread, and needs memory for each


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A function and what it is compiled for.

    Attributes:
      name: for people, "decoding 8 tokens"; another for each program of a set.
      function: of arrays, to be traced.
      arguments: pytrees of arrays, or of shapes and dtypes.
      result: a pytree of the structure of what `function` returns; leaves may be anything.
      holds: all that `function` reads beside its arguments and the sources of this package, as a
        text that is the same at each start; None: not known, for there is a user's code in it.
      donated: positions of the arguments that a call **DONATES**.
      out_shardings: where results go; None: the device that computes them.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    result: Any
    holds: str | None
    donated: tuple[int, ...] = ()
    out_shardings: Any = None

    def lower(self) -> jax.stages.Lowered:
        """Traces and lowers it."""
        placed = {} if self.out_shardings is None else {"out_shardings": self.out_shardings}
        jitted = jax.jit(self.function, donate_argnums=self.donated, **placed)
        return jitted.lower(*self.arguments)

    def known(self) -> str | None:
        """What it is, told without tracing it; None: only the lowered text tells."""
        if self.holds is None:
            return None
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        return f"{function.__module__}.{function.__qualname__} {self.donated} {self.holds}"


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """What became of one program.

    Attributes:
      name: the program's.
      seconds: that compiling it took, now or when it was kept; others compile at the same time.
      is_kept: it was there from an earlier start, and only read.
    """

    name: str
    seconds: float
    is_kept: bool

    def __str__(self) -> str:
        """A line for people."""
        how = "kept from an earlier start" if self.is_kept else "compiled"
        return f"{self.name}: {how}, {self.seconds:.1f} s"


class Countdown:
    """Says how long the rest of a start will be compiling."""

    def __init__(self) -> None:
        """Begins with the first program: what comes before, weights say, is no measure of it."""
        self._started: float | None = None
        self._num_compiled = 0

    def line(self, program: CompiledProgram, done: int, total: int) -> str | None:
        """A line about the newest program; None for one that was kept.

        The largest programs come first, so what is left is rather less than it says.
        """
        if program.is_kept:
            return None
        now = time.monotonic()
        if self._started is None:
            self._started = now - program.seconds
        self._num_compiled += 1
        each = (now - self._started) / self._num_compiled
        left = f", at most {each * (total - done):.0f} s to go" if done < total else ""
        return f"{program} ({done} of {total}{left})"


type Progress = Callable[[CompiledProgram, int, int], None]  # the newest; done, of


class Handle:
    """A compiled program, or one that is still to be read; a call reads it first."""

    def __init__(self, load: Callable[[], jax.stages.Compiled], *, was_kept: bool) -> None:
        """`load` is called at most once at a time, and not again after it returned."""
        self.was_kept = was_kept
        self._lock = threading.Lock()
        self._load: Callable[[], jax.stages.Compiled] | None = load
        self._compiled: jax.stages.Compiled | None = None

    @property
    def compiled(self) -> jax.stages.Compiled:
        """The program itself, read now if it was not."""
        if self._compiled is None:
            with self._lock:
                if self._load is not None:
                    self._compiled, self._load = self._load(), None
        assert self._compiled is not None
        return self._compiled

    def __call__(self, *arguments: Any) -> Any:
        """Runs it."""
        return (self._compiled or self.compiled)(*arguments)


class ProgramSet:
    """Compiles programs, or reads them from a store, and keeps a record of each."""

    def __init__(self, store: ProgramStore | None = None) -> None:
        """`store`: of earlier starts; None: everything is compiled."""
        self._store = store
        self._around = {} if store is None else program_key.surroundings()
        self._log: dict[str, CompiledProgram] = {}  # by name
        self._reader: threading.Thread | None = None

    @property
    def log(self) -> tuple[CompiledProgram, ...]:
        """Those that are ready or known to be kept, in the order of becoming so."""
        return tuple(self._log.values())

    def compile[Key](
        self,
        programs: Mapping[Key, Program],
        progress: Progress | None = None,
        *,
        first: Collection[Key] | None = None,
    ) -> dict[Key, Handle]:
        """Compiles several at once.

        Args:
          programs: those that take longest should come first: all threads then end together.
          progress: is called for each, in the thread that called this.
          first: what is needed first. Of the programs that the store has, the others are read
            later, in the background. None: all are needed.

        Returns:
          what to call with arrays of exactly those shapes, by the keys of `programs`.
        """
        found = {key: self._find(program) for key, program in programs.items()}
        handles = {key: handle for key, handle in found.items() if handle is not None}
        missing = {key: program for key, program in programs.items() if key not in handles}
        if progress:
            for done, key in enumerate(handles, 1):
                progress(self._log[programs[key].name], done, len(programs))
        wanted = [handles[key] for key in (programs if first is None else first) if key in handles]
        with threads.pool(MAX_THREADS) as pool:
            reads = [pool.submit(lambda handle=handle: handle.compiled) for handle in wanted]
            # Traced here, one after the other: tracing is Python, and holds its lock.
            futures = {
                pool.submit(self._compile, program, program.lower()): key
                for key, program in missing.items()
            }
            for done, future in enumerate(as_completed(futures), len(handles) + 1):
                key = futures[future]
                record, compiled = future.result()
                handles[key] = Handle(lambda it=compiled: it, was_kept=record.is_kept)
                if progress:
                    progress(record, done, len(programs))
            for read in reads:
                read.result()
        self._read_later([handle for handle in handles.values() if handle not in wanted])
        return handles

    def wait(self) -> None:
        """Returns when what is read in the background is there."""
        if self._reader is not None:
            self._reader.join()

    def _find(self, program: Program) -> Handle | None:
        """What the store has of a program, known without tracing it."""
        known = program.known()
        key = None if known is None else self._key(program, known)
        entry = None if key is None or self._store is None else self._store.read(key)
        if key is None or entry is None:
            return None

        def read() -> jax.stages.Compiled:
            compiled = self._read(program, key, entry)
            return self._compile(program, program.lower())[1] if compiled is None else compiled

        self._note(program, entry.seconds, is_kept=True)
        return Handle(read, was_kept=True)

    def _key(self, program: Program, holds: str) -> str | None:
        if self._store is None or not program_key.is_portable(program.arguments):
            return None
        return program_key.make_key(self._around, holds, program.arguments, program.out_shardings)

    def _compile(
        self, program: Program, lowered: jax.stages.Lowered
    ) -> tuple[CompiledProgram, jax.stages.Compiled]:
        if self._store is None:
            return self._compile_now(program, lowered)
        known = program.known()
        key = self._key(program, known or lowered.as_text())
        if key is None:
            return self._compile_now(program, lowered)
        entry = None if known else self._store.read(key)  # `_find` has looked for the others
        compiled = None if entry is None else self._read(program, key, entry)
        if entry is not None and compiled is not None:
            return self._note(program, entry.seconds, is_kept=True), compiled
        record, compiled = self._compile_now(program, lowered)
        payload = None if _jax_keeps() else _serialize(compiled)
        if payload is not None:
            self._store.write(key, Entry(program.name, record.seconds, payload))
        return record, compiled

    def _compile_now(
        self, program: Program, lowered: jax.stages.Lowered
    ) -> tuple[CompiledProgram, jax.stages.Compiled]:
        started = time.perf_counter()
        compiled = lowered.compile()
        if compiled.out_tree != jax.tree.structure(program.result):
            raise IntegrityError(
                f"`result` of the program {program.name!r} has another structure than what it "
                "returns. This is a bug in pagedjax: please report it."
            )
        seconds = time.perf_counter() - started
        return self._note(program, seconds, is_kept=False), compiled

    def _note(self, program: Program, seconds: float, *, is_kept: bool) -> CompiledProgram:
        record = CompiledProgram(program.name, seconds, is_kept)
        self._log[program.name] = record
        return record

    def _read(self, program: Program, key: str, entry: Entry) -> jax.stages.Compiled | None:
        """The executable; None, with a warning, when it turns out to be of no use."""
        try:
            return _deserialize(entry.payload, program)
        except Exception as error:  # of XLA's, any: the bytes are whole, but not for it
            logger.warning("compiling %s anew: what was kept is of no use: %s", program.name, error)
            if self._store is not None:
                self._store.remove(key)
            return None

    def _read_later(self, handles: list[Handle]) -> None:
        if handles:
            self._reader = threading.Thread(
                target=_read_all, args=(handles, self._reader), name="pagedjax-programs"
            )
            self._reader.start()


def _read_all(handles: list[Handle], before: threading.Thread | None) -> None:
    if before is not None:
        before.join()
    for handle in handles:
        if not threading.main_thread().is_alive():
            return  # the process ends: it does not wait for programs that nobody calls
        try:
            _ = handle.compiled
        except Exception:  # whoever calls it gets the error
            logger.debug("a program could not be read", exc_info=True)


def _jax_keeps() -> bool:
    """True when JAX keeps what it compiles by itself, as its user has told it to.

    What XLA's CPU client has read from JAX's cache, it does not write whole again: run from a
    second file, it lacks functions. So nothing is kept twice.
    """
    return bool(jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir)


def _serialize(compiled: jax.stages.Compiled) -> bytes | None:
    """None, where this device's compiler cannot."""
    try:
        return serialize_executable.serialize(compiled)[0]
    except Exception as error:
        logger.debug("a program cannot be kept: %s", error)
        return None


def _deserialize(payload: bytes, program: Program) -> jax.stages.Compiled:
    in_tree = jax.tree.structure((program.arguments, {}))
    out_tree = jax.tree.structure(program.result)
    devices = jax.devices()[:1]
    return serialize_executable.deserialize_and_load(
        payload, in_tree, out_tree, execution_devices=devices
    )


def abstract(tree: Any) -> Any:
    """Shapes and dtypes of a pytree of arrays, which may be donated meanwhile."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), tree)
