"""A job whose lines are answered by a fleet: which are left, what died, and what is given up.

Owns the rounds. A line that was begun and not answered when a round ended was with a worker that
died; it is given out again, and after `CROWD_DEATHS` such rounds alone, so that a line that kills
its worker is told from those that were beside it::

    round 1     all lines
    round 2     those that a dead worker had
    round 3, 4  those that two had, one at a time: whoever dies alone twice gets an error line
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable

from pagedjax.batch_job.answers import Answers
from pagedjax.batch_job.entry import count_answer, error_text, failure_text, read_line
from pagedjax.batch_job.errors import EnginesLost, InputChanged
from pagedjax.batch_job.ids import CustomIds
from pagedjax.batch_job.job import LINES_PER_REPORT, Summary
from pagedjax.batch_job.on_ray.fleet import Fleet
from pagedjax.batch_job.source import Source

CROWD_DEATHS = 2  # rounds that a line may lose among others
ALONE_DEATHS = 2  # and by itself
IDLE_ROUNDS = 3  # that neither answer a line nor lose one

type Report = Callable[[Summary], None]


def run_on_fleet(
    fleet: Fleet,
    source: Source,
    answers: Answers,
    *,
    before: Summary,
    on_progress: Report = lambda summary: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Summary:
    """Does what `run_batch` does, with the same answers, on a fleet that was started.

    Raises:
      EnginesLost: no worker is left.
      InputChanged: the input is not what it was.
    """
    job = FleetJob(fleet, source, answers, before, on_progress, should_stop)
    try:
        job.take_stock()
        job.run()
    finally:
        answers.close()
    job.report()
    return job.summary


class FleetJob:
    """See `run_on_fleet`."""

    def __init__(
        self,
        fleet: Fleet,
        source: Source,
        answers: Answers,
        summary: Summary,
        on_progress: Report,
        should_stop: Callable[[], bool],
    ) -> None:
        self.summary = summary
        self._fleet, self._source, self._answers = fleet, source, answers
        self._on_progress, self._should_stop = on_progress, should_stop
        self._started = time.monotonic()
        self._todo = bytearray(1)  # by number of a line: 1 while it has no answer
        self._num_left = 0
        self._deaths: Counter[int] = Counter()  # rounds that a line was lost in, where it was

    def report(self) -> None:
        """Shows the counts."""
        self.summary.seconds = time.monotonic() - self._started
        self._on_progress(self.summary)

    def take_stock(self) -> None:
        """Reads the input: which lines are left; those that nobody can read are answered."""
        ids = CustomIds()
        for number, raw in enumerate(self._source.lines(), 1):
            self._todo.append(0)
            found = read_line(number, raw, ids)
            if found is None:
                self.summary.blank += 1
            elif self._answers.expect(number, found[0].key):
                line, _, trouble = found
                if trouble is None:
                    self._todo[number] = 1
                    self._num_left += 1
                else:
                    self._put(number, failure_text(line, trouble))
            if number % LINES_PER_REPORT == 0:
                self.report()
                if self._should_stop():
                    break

    def run(self) -> None:
        """Rounds until every line has its answer."""
        alone, idle = False, 0
        while self._num_left and not self._should_stop():
            left, deaths = self._num_left, self._deaths.total()
            self._collect(alone)
            if self._should_stop():
                break
            if self._fleet.feed_trouble is not None:
                raise InputChanged
            lost = self._note_deaths()
            if alone and lost > 1 and self._num_left == left:
                raise EnginesLost("every worker dies, whichever line it has")
            self._give_up()
            alone = any(count >= CROWD_DEATHS for count in self._deaths.values())
            moved = self._num_left < left or self._deaths.total() > deaths
            idle = 0 if moved else idle + 1
            if idle >= IDLE_ROUNDS:
                raise EnginesLost("workers end before they begin a line")
        if self._num_left:
            self.summary.interrupted = True

    def _collect(self, alone: bool) -> None:
        """One round."""
        given = bytes(self._todo), self._source.stamp
        for answered in self._fleet.answers(*given, alone=alone):
            for number, text in answered:
                if self._todo[number]:  # a lost line's answer may come late
                    self._done(number)
                    self._put(number, text)
            self._answers.tick()
            self.report()
            if self._should_stop():
                return

    def _note_deaths(self) -> int:
        """Counts the lines that a dead worker had begun; returns how many."""
        lost = [number for number in self._fleet.last_begun if self._todo[number]]
        self._deaths.update(lost)
        if lost:
            self._fleet.say(
                f"warning: workers died; {len(lost)} lines that they had begun run again"
            )
        return len(lost)

    def _give_up(self) -> None:
        """Answers lines that died alone, with an error."""
        most = CROWD_DEATHS + ALONE_DEATHS
        guilty = {number for number, count in self._deaths.items() if count >= most}
        if not guilty:
            return
        ids = CustomIds()
        for number, raw in enumerate(self._source.lines(), 1):
            found = read_line(number, raw, ids)
            if found is None or number not in guilty or not self._todo[number]:
                continue
            message = f"the worker that ran this line died, {most} times; the last times alone"
            self._done(number)
            self._put(number, error_text(found[0], 500, message, "worker_died"))

    def _done(self, number: int) -> None:
        self._todo[number] = 0
        self._num_left -= 1
        self._deaths.pop(number, None)

    def _put(self, number: int, text: str) -> None:
        self._answers.put(number, text)
        count_answer(self.summary, json.loads(text))
