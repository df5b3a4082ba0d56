"""Programs: functions of fixed shapes, compiled ahead of time. The only file with `jax.jit`.

Owns how they are lowered, how several are compiled at once, and the record of what each took.
Knows nothing of what they compute; the runner says which there are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

type Progress = Callable[[int, int], None]  # (done, total) compiled programs

MAX_THREADS = 8  # XLA compiles one program mostly on one thread, and needs memory for each


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A function and what it is compiled for.

    Attributes:
      name: for people, "decoding 8 tokens".
      function: of arrays, to be traced.
      arguments: pytrees of arrays, or of shapes and dtypes.
      donated: positions of the arguments that a call **DONATES**.
      out_shardings: where results go; None: the device that computes them.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    out_shardings: Any = None

    def lower(self) -> jax.stages.Lowered:
        """Traces and lowers it."""
        placed = {} if self.out_shardings is None else {"out_shardings": self.out_shardings}
        jitted = jax.jit(self.function, donate_argnums=self.donated, **placed)
        return jitted.lower(*self.arguments)


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """What became of one program."""

    name: str
    seconds: float  # of compiling, while others are compiled too; tracing not counted


class ProgramSet:
    """Compiles programs and keeps a record of each, in the order of finishing."""

    def __init__(self) -> None:
        """Holds nothing yet."""
        self.log: list[CompiledProgram] = []

    def compile[Key](
        self, programs: Mapping[Key, Program], progress: Progress | None = None
    ) -> dict[Key, Callable[..., Any]]:
        """Compiles several at once.

        Args:
          programs: those that take longest should come first: all threads then end together.
          progress: is called after each, in the thread that called this.

        Returns:
          what to call with arrays of exactly those shapes, by the keys of `programs`.
        """
        compiled: dict[Key, Callable[..., Any]] = {}
        with ThreadPoolExecutor(_threads()) as pool:
            # Traced here, one after the other: tracing is Python, and holds its lock.
            futures = {
                key: pool.submit(self._compile, program.name, program.lower())
                for key, program in programs.items()
            }
            for done, (key, future) in enumerate(futures.items(), 1):
                compiled[key] = future.result()
                if progress:
                    progress(done, len(futures))
        return compiled

    def _compile(self, name: str, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        started = time.perf_counter()
        compiled = lowered.compile()
        self.log.append(CompiledProgram(name, time.perf_counter() - started))
        return compiled


def _threads() -> int:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cpus or 1, MAX_THREADS)
