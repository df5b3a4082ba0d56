"""The periodic log line: what an operator reads while the engine works. Knows only counters."""

from __future__ import annotations

import logging
import time
from typing import Protocol

INTERVAL_SECONDS = 10.0


class Counters(Protocol):
    """What the line needs of the scheduler."""

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        ...

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        ...

    @property
    def stats(self) -> SchedulerCounters:
        """Totals since the start."""
        ...


class SchedulerCounters(Protocol):
    """Totals since the start, and use of the pool now."""

    num_prompt_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    num_cow_copies: int

    @property
    def kv_usage(self) -> float:
        """Share of the pool's pages that sequences hold, 0 to 1."""
        ...

    @property
    def prefix_hit_rate(self) -> float:
        """Share of prompt tokens found in the prefix cache, 0 to 1."""
        ...


class ThroughputLog:
    """Writes one line every ten seconds of work, in vLLM's words because people grep for them."""

    def __init__(self, logger: logging.Logger, interval: float = INTERVAL_SECONDS) -> None:
        """Starts the clock at the first step, so that idle time is not averaged in."""
        self._logger = logger
        self._interval = interval
        self._since: float | None = None
        self._totals = (0, 0)

    def step(self, counters: Counters) -> None:
        """Called after each step; logs when the interval is over."""
        now = time.monotonic()
        if self._since is not None and 0 <= now - self._since < self._interval:
            return  # without a look at the counters: it is so after almost every step
        stats = counters.stats
        totals = (stats.num_prompt_tokens, stats.num_generated_tokens)
        if self._since is None or now - self._since > 2 * self._interval:  # the engine was idle
            self._since, self._totals = now, totals
            return
        seconds = now - self._since
        rates = [(new - old) / seconds for new, old in zip(totals, self._totals, strict=True)]
        self._logger.info(line(counters, *rates))
        self._since, self._totals = now, totals


def line(counters: Counters, prompt_rate: float, generation_rate: float) -> str:
    """The line itself; rates in tokens a second."""
    stats = counters.stats
    return (
        f"Avg prompt throughput: {prompt_rate:.1f} tokens/s, "
        f"Avg generation throughput: {generation_rate:.1f} tokens/s, "
        f"Running: {counters.num_running} reqs, Waiting: {counters.num_waiting} reqs, "
        f"Preemptions: {stats.num_preemptions}, "
        f"KV cache usage: {stats.kv_usage:.1%}, "
        f"Prefix cache hit rate: {stats.prefix_hit_rate:.1%}, "
        f"COW copies: {stats.num_cow_copies}"
    )
