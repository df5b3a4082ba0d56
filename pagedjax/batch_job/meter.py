"""The figures of a running job: counts, rates over the last seconds, and when it will be done.

Owns arithmetic and time. Knows nothing of how figures are shown.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from pagedjax.batch_job.job import Summary
from pagedjax.throughput import Counters

WINDOW_SECONDS = 10.0  # that rates are averaged over


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What is known at one moment. Rates are of the engine's work: prompts computed, not hit."""

    seconds: float  # of this run
    lines: int  # done with, blank ones and those of earlier runs too
    num_lines: int | None  # of the input; None: not known
    answered: int  # by this run
    failed: int
    done_before: int  # by earlier runs
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    running: int  # sequences in steps
    waiting: int  # in the engine's queue
    kv_usage: float  # share of the pool's pages that are held, 0 to 1
    prefix_hit_rate: float  # share of prompt tokens found in the prefix cache, 0 to 1
    preemptions: int
    eta_seconds: float | None  # until the last line, at this run's lines a second

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }

    def engine(self) -> str:
        """What the engine does, within 80 characters."""
        return (
            f"in {self.prompt_tokens_per_s:.0f} out {self.output_tokens_per_s:.0f} tok/s, "
            f"{self.running} run {self.waiting} wait, KV {self.kv_usage:.0%}, "
            f"prefix hits {self.prefix_hit_rate:.0%}, {self.preemptions} preempted"
        )

    def __str__(self) -> str:
        of = "" if self.num_lines is None else f" of {self.num_lines}"
        eta = "" if self.eta_seconds is None else f"; about {duration(self.eta_seconds)} left"
        before = f", {self.done_before} done before" if self.done_before else ""
        return (
            f"{self.lines}{of} lines: {self.answered} answered, {self.failed} failed{before}; "
            f"{self.engine()}{eta}"
        )


class Meter:
    """Makes figures of a job's counts and its engine's."""

    def __init__(
        self,
        counters: Counters,
        num_lines: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts the clock.

        Args:
          counters: of the engine.
          num_lines: of the input; None: not known.
          clock: seconds, never going back.
        """
        self._counters, self._num_lines, self._clock = counters, num_lines, clock
        stats = counters.stats
        start = (clock(), stats.num_prompt_tokens, stats.num_generated_tokens)
        self._samples = deque([start])  # (seconds, prompt tokens, generated tokens), a window of

    def read(self, summary: Summary) -> Figures:
        """The figures now."""
        stats = self._counters.stats
        prompt_rate, output_rate = self._rates(stats.num_prompt_tokens, stats.num_generated_tokens)
        return Figures(
            seconds=summary.seconds,
            lines=summary.num_lines,
            num_lines=self._num_lines,
            answered=summary.answered,
            failed=summary.failed,
            done_before=summary.num_before,
            prompt_tokens_per_s=prompt_rate,
            output_tokens_per_s=output_rate,
            running=self._counters.num_running,
            waiting=self._counters.num_waiting,
            kv_usage=stats.kv_usage,
            prefix_hit_rate=stats.prefix_hit_rate,
            preemptions=stats.num_preemptions,
            eta_seconds=self._eta(summary),
        )

    def _rates(self, prompt: int, generated: int) -> tuple[float, float]:
        now = self._clock()
        self._samples.append((now, prompt, generated))
        while len(self._samples) > 2 and now - self._samples[1][0] >= WINDOW_SECONDS:
            self._samples.popleft()
        then, old_prompt, old_generated = self._samples[0]
        seconds = now - then
        if seconds <= 0.0:
            return 0.0, 0.0
        return (prompt - old_prompt) / seconds, (generated - old_generated) / seconds

    def _eta(self, summary: Summary) -> float | None:
        done = summary.answered + summary.failed
        if self._num_lines is None or not done:
            return None
        return max(0, self._num_lines - summary.num_lines) * summary.seconds / done


def duration(seconds: float) -> str:
    """For people: 42 s, 7 min, 3.4 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
