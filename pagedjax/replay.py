"""Replays an event log: the same inputs to a fresh scheduler, and every decision compared.

Owns how an input is given again and how two decisions are compared. Knows nothing of devices: what
steps sampled is in the log.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.config import SchedulerConfig
from pagedjax.errors import EventLogError, PagedJaxError
from pagedjax.events import (
    Added,
    Called,
    Costs,
    Dropped,
    Event,
    Header,
    Logged,
    Result,
    Stalled,
    Step,
    decode,
    decode_request,
    encode,
    read_events,
)
from pagedjax.plan import MAX_LOGPROBS, StepPlan, StepResult
from pagedjax.request import FinishReason, Sequence
from pagedjax.scheduler import Scheduler
from pagedjax.scheduling.recorder import name_of

INPUTS = (Added, Costs, Result, Dropped, Called)  # what the outside did; all else was decided
NUM_PLANS = 64  # that are kept for a result to come; far fewer are ever in flight


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision that came out otherwise.

    Attributes:
      line: of the log.
      step: the last step that was planned, by the log.
      what: field of the event, or the event itself.
      logged, replayed: its two values; None: there was none.
    """

    line: int
    step: int
    what: str
    logged: Any
    replayed: Any

    def __str__(self) -> str:
        """Both sides, in three lines."""
        return (
            f"line {self.line}, step {self.step}: {self.what} differs\n"
            f"  in the log: {self.logged}\n  replayed:   {self.replayed}"
        )


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay compared. `difference` is None when all decisions were equal."""

    version: str  # of pagedjax, that wrote the log
    num_lines: int
    num_steps: int
    num_decisions: int  # steps included
    difference: Difference | None


def replay(path: str | Path) -> ReplayReport:
    """Replays a log to its first difference, or to its end.

    Raises:
      EventLogError: the file cannot be read, is of another schema, or a line is damaged.
    """
    lines = read_events(path)
    player = _Player(next(lines).event)
    difference, number = None, 1
    try:
        for logged in lines:
            number = logged.line
            difference = player.play(logged)
            if difference is not None:
                break
    except PagedJaxError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise EventLogError(
            f"{path}, line {number} is damaged: {type(error).__name__}: {error}."
        ) from error
    return ReplayReport(
        version=player.header.version,
        num_lines=number,
        num_steps=player.num_steps,
        num_decisions=player.num_decisions,
        difference=difference,
    )


class _Player:
    """Gives a log's inputs to a scheduler of its own, and takes that one's events."""

    def __init__(self, header: Header):
        self.header = header
        self.num_steps = self.num_decisions = 0
        self._decided: deque[Event] = deque()  # by the replayed scheduler, not compared yet
        self._sequences: dict[str, Sequence] = {}
        self._plans: dict[int, StepPlan] = {}
        self._scheduler = Scheduler(_config(header), events=self)

    def emit(self, event: Event) -> None:
        """Takes what the replayed scheduler says; of its inputs nothing is to be compared."""
        if not isinstance(event, (*INPUTS, Header)):
            self._decided.append(decode(encode(event))[0])  # as it would be read from a log

    def flush(self) -> None:
        """Nothing is kept back."""

    def play(self, logged: Logged) -> Difference | None:
        """Follows one line of the log."""
        event = logged.event
        try:
            if isinstance(event, INPUTS):
                if self._decided:
                    return self._differ(logged, "decision", None, self._decided[0])
                self._give(event)
                return None
            if isinstance(event, Step | Stalled) and not self._decided:
                self._schedule()
        except PagedJaxError as error:
            return self._differ(logged, type(event).__name__.lower(), event, error)
        replayed = self._decided.popleft() if self._decided else None
        if isinstance(event, Step):
            self.num_steps = event.step
        self.num_decisions += 1
        if replayed is None or type(event) is not type(replayed):
            return self._differ(logged, "decision", event, replayed)
        for item in fields(event):
            sides = getattr(event, item.name), getattr(replayed, item.name)
            if sides[0] != sides[1]:
                return self._differ(logged, f"`{item.name}`", *sides)
        return None

    def _differ(self, logged: Logged, what: str, *sides: Any) -> Difference:
        return Difference(logged.line, self.num_steps, what, *sides)

    def _schedule(self, only: frozenset[str] | None = None) -> None:
        plan = self._scheduler.schedule(only)
        if plan is not None:
            self._plans[plan.step] = plan
            self._plans.pop(plan.step - NUM_PLANS, None)

    def _give(self, event: Any) -> None:
        match event:
            case Added():
                for sequence in self._scheduler.add_request(decode_request(event.request)):
                    self._sequences[name_of(sequence)] = sequence
            case Costs():
                for name, rate in event.rates.items():
                    if not isinstance(getattr(self._scheduler.costs, name), float):
                        raise TypeError(f"{name!r} is no rate")
                    setattr(self._scheduler.costs, name, rate)
            case Result():
                plan = self._plans[event.step]
                self._scheduler.update(plan, _result(event, len(plan.rows.slot)))
            case Dropped():
                self._scheduler.drop(self._plans.pop(event.step), **_arguments(event.arguments))
            case Called():
                self._call(event.method, dict(event.arguments))
            case _:
                raise TypeError(f"{type(event).__name__} cannot be replayed")

    def _call(self, method: str, arguments: dict[str, Any]) -> None:
        if "reason" in arguments:
            arguments["reason"] = FinishReason(arguments["reason"])
        if "sequence" in arguments:
            arguments["sequence"] = self._sequences[arguments["sequence"]]
        scheduler = self._scheduler
        match method:
            case "pin" | "unpin":
                getattr(scheduler.pins, method)(tuple(arguments["prefix"]), arguments["salt"])
            case "schedule":
                self._schedule(frozenset(arguments["only"]))
            case "forget_device_pages" | "finish" | "fail" | "abort" | "reset_prefix_cache":
                getattr(scheduler, method)(**arguments)
            case _:
                raise ValueError(f"{method!r} is no method that can be replayed")


def _config(header: Header) -> SchedulerConfig:
    try:
        return SchedulerConfig(**header.config)
    except (PagedJaxError, TypeError) as error:
        raise EventLogError(
            f"line 1 must hold a configuration that this pagedjax understands. Got one of "
            f"pagedjax {header.version}: {error}."
        ) from error


def _result(event: Result, num_rows: int) -> StepResult:
    """Logprobs are not in a log, except where they decide something: no other decision reads
    them."""
    tokens, corrupted = np.zeros(num_rows, np.int32), np.zeros(num_rows, bool)
    tokens[: len(event.tokens)] = event.tokens
    corrupted[event.corrupted] = True
    top_ids = np.zeros((num_rows, MAX_LOGPROBS), np.int32)
    top_logprobs = np.zeros((num_rows, MAX_LOGPROBS), np.float32)
    for row, ids, logprobs in event.candidates:
        top_ids[row, : len(ids)] = ids
        top_logprobs[row, : len(logprobs)] = logprobs
    return StepResult(
        tokens=tokens,
        logprobs=np.zeros(num_rows, np.float32),
        ranks=np.zeros(num_rows, np.int32),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        corrupted=corrupted,
        lost_host_pages=frozenset(event.lost),
    )


def _arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """As the scheduler takes them: JSON has lists for sets."""
    return {
        key: frozenset(value) if isinstance(value, list) else value
        for key, value in arguments.items()
    }
