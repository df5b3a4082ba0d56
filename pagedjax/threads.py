"""Threads for work that leaves Python's lock: compiling, and reading weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


def num_cpus() -> int:
    """Processors that this process may run on. XLA splits work by that when it compiles."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return usable or 1


@contextmanager
def pool(most: int) -> Iterator[ThreadPoolExecutor]:
    """A thread for each processor, at most `most`.

    What did not begin when something is raised never does.
    """
    made = ThreadPoolExecutor(min(num_cpus(), most))
    try:
        yield made
    finally:
        made.shutdown(cancel_futures=True)
