"""Who works for a job and what they began: the one thing that workers and the driver share.

An actor of its own on the driver's machine, one for each round. Owns facts that must survive a
worker; knows nothing of answers, which go through the data pipeline.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class Roll:
    """What is known at one moment.

    Attributes:
      figures: of each worker that ever reported, by name: totals and gauges of its engine.
      silent: seconds since each of them was heard.
      num_joined: processes that began to load a model.
      num_ready: those of them that had it loaded.
      num_begun: lines that were given to an engine.
      refusals: why a worker cannot start, for people.
      notes: what happened to workers, for people; told once.
      feed_trouble: why the feed ended early; None: it did not.
    """

    figures: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    silent: dict[str, float] = field(default_factory=dict[str, float])
    num_joined: int = 0
    num_ready: int = 0
    num_begun: int = 0
    refusals: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    feed_trouble: str | None = None


class Roster:
    """Takes reports, and hands them to the driver."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Knows nobody yet; `clock` gives seconds."""
        self._clock = clock
        self._roll = Roll()
        self._heard: dict[str, float] = {}
        self._todo: tuple[bytes, tuple[int, int]] | None = None
        self._begun: set[int] = set()

    def join(self, worker: str) -> None:
        """A process begins to load a model."""
        self._roll.num_joined += 1
        self._heard[worker] = self._clock()

    def ready(self, worker: str) -> None:
        """It has it."""
        self._roll.num_ready += 1
        self._heard[worker] = self._clock()

    def report(self, worker: str, figures: dict[str, Any]) -> None:
        """A sign of life, with what its engine did so far."""
        self._heard[worker] = self._clock()
        self._roll.figures[worker] = figures

    def refuse(self, why: str) -> None:
        """A worker cannot start."""
        self._roll.refusals.append(why)

    def note(self, what: str) -> None:
        """Something that the user should see."""
        self._roll.notes.append(what)

    def begin(self, numbers: list[int]) -> None:
        """A worker gives these lines to its engine; if it dies, one of them may be why."""
        self._begun.update(numbers)
        self._roll.num_begun = len(self._begun)

    def begun(self) -> set[int]:
        """All that was begun."""
        return self._begun

    def publish(self, todo: bytes, stamp: tuple[int, int]) -> None:
        """What the feed waits for.

        Args:
          todo: which lines are to be answered: a byte for each number from 0, zero or not.
          stamp: of the input that they were counted in, see `Source`.
        """
        self._todo = todo, stamp

    def todo(self) -> tuple[bytes, tuple[int, int]] | None:
        """None until `publish`."""
        return self._todo

    def fed(self, trouble: str | None) -> None:
        """The feed ended; `trouble`: why before its time."""
        self._roll.feed_trouble = trouble

    def read(self) -> Roll:
        """The state now; notes are handed over."""
        now, roll = self._clock(), self._roll
        roll.silent = {worker: now - heard for worker, heard in self._heard.items()}
        told = Roll(**{name: getattr(roll, name) for name in Roll.__dataclass_fields__})
        roll.notes = []
        return told
