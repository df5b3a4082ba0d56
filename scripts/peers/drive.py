"""Drives an engine through a workload: adds each request when it is due, notes when tokens come.

Open loop: a request is added at its arrival time, whether the engine keeps up or not, and its times
count from then. Knows no engine; stdlib only, since it runs in every peer's Python.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

UNKNOWN_TOKEN = -1  # a token that an engine counted without telling which it was


class WrongAnswer(Exception):
    """An engine gave another number of tokens than it was asked for."""


class Engine(Protocol):
    """What an adapter has to offer."""

    def add(self, index: int, prompt_ids: Sequence[int], max_new: int) -> None:
        """Queues a request: greedy, exactly `max_new` tokens, eos ignored."""
        ...

    def step(self, wait: float) -> Iterable[tuple[int, Sequence[int], bool]]:
        """Runs a step, or waits up to `wait` seconds for tokens of an engine that runs by itself.

        Returns:
          for each request that advanced: its index, its new tokens, and whether it ended.
        """
        ...


class Clock:
    """Seconds, and a way to let them pass; tests bring one of their own."""

    def now(self) -> float:
        """Seconds since some moment, never going back."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Lets time pass."""
        time.sleep(seconds)


def drive(
    engine: Engine, requests: Sequence[dict[str, Any]], clock: Clock | None = None
) -> dict[str, Any]:
    """Runs a workload to its end.

    Args:
      requests: `{"prompt_ids", "max_new", "arrival_s"?}`; without arrival times all are there at
        the start.

    Returns:
      `seconds` from the start to the last token; `requests`, in the workload's order: `arrival_s`,
      `tokens`, and `times`, when each token came, in seconds since the start.

    Raises:
      WrongAnswer: with the request and both numbers.
    """
    clock = clock or Clock()
    due = sorted(range(len(requests)), key=lambda i: (_arrival(requests[i]), i), reverse=True)
    records = [{"arrival_s": _arrival(r), "tokens": [], "times": []} for r in requests]
    running: set[int] = set()
    started = clock.now()
    while due or running:
        now = clock.now() - started
        while due and _arrival(requests[due[-1]]) <= now:
            index = due.pop()
            engine.add(index, requests[index]["prompt_ids"], requests[index]["max_new"])
            running.add(index)
        until_next = _arrival(requests[due[-1]]) - now if due else 1.0
        if not running:
            clock.sleep(max(0.0, until_next))
            continue
        for index, tokens, ended in engine.step(max(0.0, until_next)):
            now = clock.now() - started
            records[index]["tokens"].extend(tokens)
            records[index]["times"].extend([round(now, 6)] * len(tokens))
            if ended:
                _check(index, len(records[index]["tokens"]), requests[index]["max_new"])
                running.discard(index)
    return {"seconds": clock.now() - started, "requests": records}


def _arrival(request: dict[str, Any]) -> float:
    return request.get("arrival_s") or 0.0


def _check(index: int, given: int, asked: int) -> None:
    if given != asked:
        raise WrongAnswer(f"request {index} must get {asked} tokens. Got {given}.")
