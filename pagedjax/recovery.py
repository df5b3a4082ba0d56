"""Steps that may raise: what failed is computed again, and who makes steps fail fails alone.

Owns the order of steps (schedule, launch, read, update) and what happens when one breaks off. Knows
nothing of requests' texts or of what a device is; the runner says what it lost.

**Ahead.** With a depth of two, step N + 1 is launched before step N is read, so that the device
never waits for the host. Steps are read in order; whatever ends in N was run once more in N + 1 for
nothing. Where the scheduler can not go on without N's result, N is read first.

**A step that raises** is dropped and its sequences queue again. Its requests are suspects: they
are tried again in halves, nobody else beside them, until one fails in a trial of its own. That one
ends with an error; the others are cleared as soon as each got a token more than it had. What fails
once and never again therefore harms nobody.

**A device that is gone** fails for everybody: when it cannot even run an idle step, or when several
requests fail alone with no step between them that went well, all requests end and `DeviceError` is
raised. Each failure splits a trial, ends a request or ends them all, so there is an end to it.

**An interrupt** may come at any point; it waits where the scheduler plans or takes in a result,
which is done whole. Nothing is mended then; the next step does it first.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from pagedjax.errors import DeviceError, PagedJaxError, TransferError
from pagedjax.interrupts import HeldInterrupt
from pagedjax.plan import StepPlan, StepResult
from pagedjax.rates import Rates
from pagedjax.request import Sequence
from pagedjax.scheduler import Scheduler

logger = logging.getLogger("pagedjax")

STEPS_BETWEEN_RATES = 16  # they are medians, and change slowly
MAX_FAILED_ALONE = 8  # requests in a row; then it is not the requests
MAX_RECOVERIES = 3  # tries to get a device to run an idle step
MAX_TEXT = 300  # characters of a device's own message in ours

type ReadResult = Callable[[], StepResult]
type Lengths = dict[Sequence, int]  # a suspect's sequences -> tokens when the step failed


class Runner(Protocol):
    """What a step needs of the device half."""

    def launch(self, plan: StepPlan) -> ReadResult:
        """Starts one step; what it returns waits for the result, and is called once."""
        ...

    def recover(self) -> bool:
        """After a step that raised; True when pages or sampler rows lost what they held."""
        ...


@dataclass(slots=True)
class _Flight:
    """A step that was planned, and neither read nor dropped."""

    plan: StepPlan
    read: ReadResult


class Quarantine:
    """Who may have made a step fail, in groups that are tried one after the other."""

    def __init__(self) -> None:
        """Suspects nobody."""
        self._trials: list[dict[str, Lengths]] = []  # request id -> lengths; the first is tried

    @property
    def only(self) -> frozenset[str] | None:
        """Ids of the requests that may run now; None: all."""
        return frozenset(self._trials[0]) if self._trials else None

    def suspect(self, sequences: Iterable[Sequence]) -> str | None:
        """Takes in that a step with these failed; returns the request that was tried alone."""
        suspects: dict[str, Lengths] = {}
        for sequence in sequences:
            lengths = suspects.setdefault(sequence.request.request_id, {})
            lengths[sequence] = sequence.num_tokens
        tried = self._trials.pop(0) if self._trials else {}
        if len(suspects) == 1 and suspects.keys() == tried.keys():
            return next(iter(suspects))
        items = list(suspects.items())
        half = len(items) // 2
        untried = {name: tried[name] for name in tried if name not in suspects}
        groups = [dict(items[:half]), dict(items[half:]), untried]
        self._trials[:0] = [group for group in groups if group]
        return None

    def clear(self) -> None:
        """Ends the trials in which every sequence has a token more, or has ended."""
        while self._trials and all(
            sequence.is_finished or sequence.num_tokens > length
            for lengths in self._trials[0].values()
            for sequence, length in lengths.items()
        ):
            del self._trials[0]

    def skip(self) -> None:
        """Ends the trial that is on: there is nothing to run in it."""
        del self._trials[0]


class GuardedSteps:
    """Runs the scheduler's steps on a runner that may raise."""

    def __init__(
        self,
        scheduler: Scheduler,
        rates: Callable[[], Rates] | None = None,
        *,
        depth: int = 1,
    ):
        """Starts with a runner that is whole.

        Args:
          rates: what the device's times are now; None: nobody says.
          depth: steps that may be in flight when one is waited for: with two the device goes on
            while the host reads and schedules.
        """
        self._scheduler = scheduler
        self._rates = rates
        self._depth = depth
        self._num_steps = 0
        self._quarantine = Quarantine()
        self._failed_alone = 0  # since the last step that went well
        self._flights = deque[_Flight]()  # oldest first
        self._is_settled = True  # False: a call was interrupted
        self._is_whole = True  # False: the runner must recover before it is used again
        self._has_lost = False  # what requests had on the device is gone, and they were not told

    def run(self, runner: Runner) -> list[Sequence] | None:
        """Waits for one step, after the next one was launched.

        Returns:
          the sequences that got a token or ended; None when nothing can be scheduled.

        Raises:
          DeviceError: no step succeeds any more; every request was ended with an error.
        """
        if not self._is_settled:
            self._drop_all()
        self._is_settled = False
        advanced = self._run(runner)
        self._is_settled = True
        return advanced

    def _run(self, runner: Runner) -> list[Sequence] | None:
        is_idle = not self._flights
        if is_idle and self._scheduler.has_work and not self._is_whole:
            self._mend(runner)
        while self._is_whole and self._has_room and (flight := self._plan()) is not None:
            is_idle = False
            self._launch(runner, flight)
        if self._flights:
            return self._read()
        return None if is_idle else []

    @property
    def _has_room(self) -> bool:
        """Whether one more step may be launched; suspects are tried one step at a time."""
        self._quarantine.clear()
        return len(self._flights) < (self._depth if self._quarantine.only is None else 1)

    def _tell_rates(self) -> None:
        """The scheduler weighs swaps against recomputation with what was measured."""
        if self._rates is not None and self._num_steps % STEPS_BETWEEN_RATES == 0:
            for name, seconds in dataclasses.asdict(self._rates()).items():
                if seconds is not None:
                    setattr(self._scheduler.costs, name, seconds)
        self._num_steps += 1

    def _schedule(self) -> StepPlan | None:
        if not self._scheduler.has_work:
            return None
        self._tell_rates()
        while (only := self._quarantine.only) is not None:
            plan = self._scheduler.schedule(only)
            if plan is not None:
                return plan
            self._quarantine.skip()
        return self._scheduler.schedule()

    def _plan(self) -> _Flight | None:
        """Puts the next step in flight, all of it or nothing."""
        with HeldInterrupt():
            plan = self._schedule()
            if plan is None:
                return None
            flight = _Flight(plan, _not_launched)
            self._flights.append(flight)
        return flight

    def _launch(self, runner: Runner, flight: _Flight) -> None:
        """Starts a step. What it raises is kept until its turn comes to be read."""
        try:
            flight.read = runner.launch(flight.plan)
        except TransferError as error:
            logger.warning("%s", error)
            self._is_whole = False
            self._scheduler.drop(flight.plan, lost=error.host_pages, has_run=False)
            self._flights.pop()
        except Exception as error:
            self._is_whole = False
            flight.read = partial(_raise, error)

    def _read(self) -> list[Sequence]:
        """Waits for the oldest step in flight. If it failed, so did those launched after it."""
        plan = self._flights[0].plan
        try:
            result = self._flights[0].read()
        except Exception as error:
            logger.warning("a step of %d requests failed", len(_ids(plan)), exc_info=True)
            self._drop_all()
            return self._blame(plan, error)
        with HeldInterrupt():
            advanced = self._scheduler.update(plan, result)
            self._flights.popleft()
        self._failed_alone = 0
        return advanced

    def _drop_all(self) -> None:
        """Nothing in flight will be read, and the runner must recover."""
        self._is_whole = False
        with HeldInterrupt():
            while self._flights:
                self._scheduler.drop(self._flights[-1].plan)
                self._flights.pop()

    def _blame(self, plan: StepPlan, error: Exception) -> list[Sequence]:
        """Ends the request that failed alone; returns its sequences of this step."""
        sequences = [s.sequence for s in plan.scheduled if not s.sequence.is_finished]
        culprit = self._quarantine.suspect(sequences)
        if culprit is None:
            return []
        self._failed_alone += 1
        if self._failed_alone >= MAX_FAILED_ALONE:
            raise self._give_up(error) from error
        self._scheduler.fail(culprit, _message("this request's step failed alone, twice", error))
        return sequences

    def _mend(self, runner: Runner) -> None:
        """Makes the device usable again and tells the scheduler what it lost."""
        for attempt in range(1, MAX_RECOVERIES + 1):
            had_lost, self._has_lost = self._has_lost, True  # for the case that this breaks off
            try:
                self._has_lost = runner.recover() or had_lost
                break
            except Exception as error:
                logger.warning("the device runs no step (try %d)", attempt, exc_info=True)
                if attempt == MAX_RECOVERIES:
                    raise self._give_up(error) from error
        if self._has_lost:
            logger.warning("page contents were lost: what was running is computed again")
            self._scheduler.forget_device_pages()
        self._is_whole, self._has_lost = True, False

    def _give_up(self, error: Exception) -> DeviceError:
        """Ends every request; returns what to raise."""
        message = _message("steps fail for every request", error)
        for request_id in list(self._scheduler.roster.requests):
            self._scheduler.fail(request_id, message)
        self._failed_alone = 0
        return DeviceError(
            f"{message}. Every request in flight was ended. Restart the process if this goes on."
        )


def _not_launched() -> StepResult:
    raise RuntimeError("the step was not launched")


def _raise(error: Exception) -> StepResult:
    raise error


def _ids(plan: StepPlan) -> set[str]:
    return {scheduled.sequence.request.request_id for scheduled in plan.scheduled}


def _message(what: str, error: Exception) -> str:
    """Our sentence, begun by the kind of error, with the device's own in it."""
    text = " ".join(str(error).split())[:MAX_TEXT]
    is_memory = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text
    kind = "CapacityError: out of memory" if is_memory else "DeviceError"
    if isinstance(error, PagedJaxError):
        kind = type(error).__name__
    return f"{kind}: {what} ({type(error).__name__}: {text})"
