"""Moving medians of what was measured: one slow call, a pause of the machine, moves none of them.

Knows nothing of what is measured.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

WINDOW = 15  # samples; half of them must change before the median follows


class MovingMedian:
    """The median of the last few samples."""

    def __init__(self) -> None:
        """Starts without a sample."""
        self._samples: deque[float] = deque(maxlen=WINDOW)

    @property
    def value(self) -> float | None:
        """The median; None before the first sample."""
        return statistics.median(self._samples) if self._samples else None

    def add(self, sample: float) -> None:
        """Takes in a sample."""
        self._samples.append(sample)


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of the engine's thread; None: not measured yet."""

    seconds_per_page_out: float | None = None
    seconds_per_page_in: float | None = None
    seconds_per_token: float | None = None  # of a prompt, in steps that prompts fill
