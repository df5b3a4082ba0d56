"""Makes `schedule` fail at each of its calls for pages, and sees that nothing has changed."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from pagedjax.errors import AllocationError
from pagedjax.plan import StepPlan
from pagedjax.request import Sequence
from pagedjax.scheduler import Scheduler


def snapshot(scheduler: Scheduler) -> Any:
    """Everything that can be seen of a scheduler's state, as plain values."""
    allocator, cache, roster = scheduler.allocator, scheduler.prefix_cache, scheduler.roster
    pages = range(1, allocator.num_pages)
    lives = {}
    for live in roster.live.values():
        values = {name: getattr(live.sequence, name) for name in Sequence.__slots__}
        del values["request"]
        lives[live.key] = copy.deepcopy(values) | {
            "pages": live.table.pages,
            "table tokens": live.table.num_tokens,
            "capacity": live.capacity,
            "tail": live.shares_tail,
            "in flight": id(live.in_flight),
            "row": live.row_state,
            "forked": (live.owner.is_forked, live.owner.was_admitted, len(live.owner.members)),
        }
    return {
        "free": (allocator.num_free, allocator.num_evictable, allocator.eviction_order()),
        "references": [allocator.references(page) for page in pages],
        "cached": [allocator.is_cached(page) for page in pages],
        "listener": allocator.on_evict,
        "stats": (scheduler.stats, copy.copy(cache.stats)),
        "slots": list(roster.free_slots),
        "queues": [[live.key for live in queue] for queue in (roster.waiting, roster.running)],
        "requests": sorted(roster.requests),
        "lives": lives,
    }


class Injected(AllocationError):
    """What a call for pages raises when a test says so."""


def schedule_with_failures(scheduler: Scheduler) -> StepPlan | None:
    """`schedule`, after it failed at each of its calls for pages and changed nothing each time."""
    allocator, before = scheduler.allocator, snapshot(scheduler)
    for num_calls in itertools.count():
        left = iter(range(num_calls))
        for call in (allocator.allocate, allocator.share):
            setattr(allocator, call.__name__, failing_after(left, call))
        try:
            return scheduler.schedule()
        except Injected:
            pass
        finally:
            del allocator.allocate, allocator.share
        assert snapshot(scheduler) == before
        scheduler.check_integrity()
    raise AssertionError("unreachable")


def failing_after(left: Iterator[int], call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise Injected
        return call(*arguments)

    return wrapper
