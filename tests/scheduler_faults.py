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
    pages, host = range(1, allocator.num_pages), scheduler.host.allocator
    host_pages = range(1, host.num_pages)
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
            "host": (live.host_pages, live.restored, live.num_lost_tokens),
            "forked": (live.owner.is_forked, live.owner.was_admitted, len(live.owner.members)),
        }
    return {
        "free": [
            (pool.num_free, pool.num_evictable, pool.num_references, pool.eviction_order())
            for pool in (allocator, host)
        ],
        "references": [allocator.references(page) for page in pages],
        "cached": [allocator.is_cached(page) for page in pages],
        "host references": [host.references(page) for page in host_pages],
        "host cached": [host.is_cached(page) for page in host_pages],
        "listeners": (allocator.on_evict, host.on_evict),
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
    pools, before = (scheduler.allocator, scheduler.host.allocator), snapshot(scheduler)
    for num_calls in itertools.count():
        left = iter(range(num_calls))
        for pool in pools:
            for call in (pool.allocate, pool.share):
                setattr(pool, call.__name__, failing_after(left, call))
        try:
            return scheduler.schedule()
        except Injected:
            pass
        finally:
            for pool in pools:
                del pool.allocate, pool.share
        assert snapshot(scheduler) == before
        scheduler.check_integrity()
    raise AssertionError("unreachable")


def failing_after(left: Iterator[int], call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise Injected
        return call(*arguments)

    return wrapper
