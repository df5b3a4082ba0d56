"""When requests with a timeout must end: a heap, so that a step looks at nothing that is not due.

Knows the requests' own deadlines and nothing of clocks, steps or why a request ended.
"""

from __future__ import annotations

import heapq

from pagedjax.in_flight import InFlight

_SMALLEST_LIMIT = 64  # entries below which a sweep is not worth it


class Deadlines:
    """The deadlines of requests in flight; O(log n) a request, whatever way it ends."""

    def __init__(self) -> None:
        """Starts empty."""
        self._heap: list[tuple[float, int, InFlight]] = []  # arrival is unique: no tie goes on
        self._limit = _SMALLEST_LIMIT

    def __len__(self) -> int:
        """Entries held, those of requests that ended before their time included."""
        return len(self._heap)

    def add(self, live: InFlight) -> None:
        """Takes a request; nothing happens when it has no timeout."""
        request = live.request
        if request.timeout is None:
            return
        if len(self._heap) >= self._limit:  # most may have ended long before their time
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)
            self._limit = max(_SMALLEST_LIMIT, 2 * len(self._heap))
        heapq.heappush(self._heap, (request.arrival_time + request.timeout, request.arrival, live))

    def due(self, now: float) -> list[InFlight]:
        """Takes out the requests whose time is over at `now` and that have not ended."""
        found: list[InFlight] = []
        while self._heap and self._heap[0][0] <= now:
            live = heapq.heappop(self._heap)[2]
            if not live.is_finished:
                found.append(live)
        return found
