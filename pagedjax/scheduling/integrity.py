"""Whether queues, slots, page tables, allocators, prefix cache and host tier agree: facts, or an
exception.

Owns no state. Everything here raises `IntegrityError`, also under `python -O`.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from pagedjax.config import SchedulerConfig
from pagedjax.errors import IntegrityError
from pagedjax.paging import HostTier, PageAllocator, PrefixCache
from pagedjax.request import SequenceStatus
from pagedjax.scheduling.beams import lane_problems
from pagedjax.scheduling.live import LiveSequence
from pagedjax.scheduling.pins import Pins
from pagedjax.scheduling.plan_builder import PlanBuilder
from pagedjax.scheduling.roster import Roster


def check_integrity(
    config: SchedulerConfig,
    allocator: PageAllocator,
    cache: PrefixCache,
    host: HostTier,
    roster: Roster,
    builder: PlanBuilder,
    pins: Pins,
) -> None:
    """Raises `IntegrityError` with the facts when two records of the same thing differ."""
    tables = [live.table.pages for live in roster.live.values()]
    allocator.check_integrity([*tables, *pins.pages])
    cache.check_integrity()
    host.allocator.check_integrity([live.host_pages for live in roster.live.values()])
    host.check_integrity()
    _check_places(roster)
    _check_slots(config, roster)
    problems = [text for owner in roster.requests.values() for text in lane_problems(owner)]
    if problems:
        raise IntegrityError("; ".join(problems))
    for live in roster.live.values():
        if live.sequence.status is SequenceStatus.RUNNING:
            _check_running(live, config, allocator, builder)
        else:
            _check_waiting(live, config)


def check_empty(
    config: SchedulerConfig,
    allocator: PageAllocator,
    host: HostTier,
    roster: Roster,
    pins: Pins,
) -> None:
    """Raises `IntegrityError` when anything is left of the requests that ended."""
    left = (len(roster.requests), len(roster.live), len(roster.waiting), len(roster.running))
    if any(left):
        raise IntegrityError(
            f"no work must be left. Got (requests, sequences, waiting, running): {left}."
        )
    if roster.free_slots != list(range(config.max_num_seqs)):
        raise IntegrityError(f"all slots must be free. Got {roster.free_slots}.")
    if allocator.num_held != pins.num_pages:
        raise IntegrityError(
            f"only the {pins.num_pages} pinned pages must be held. Got {allocator.num_held}."
        )
    if host.allocator.num_held:
        raise IntegrityError(f"no host page must be held. Got {host.allocator.num_held}.")


def _check_places(roster: Roster) -> None:
    """Every live sequence is in one queue, or stood for by the first of its request."""
    for name, queue in (("waiting", roster.waiting), ("running", roster.running)):
        keys = [live.key for live in queue]
        if any(a >= b for a, b in pairwise(keys)):
            raise IntegrityError(f"{name} must be ordered by age. Got {keys}.")
    queued = [owner.request for owner in roster.requests.values() if not owner.was_admitted]
    expected = (len(queued), sum(len(request.prompt_token_ids) for request in queued))
    found = (roster.num_queued_requests, roster.num_queued_tokens)
    if found != expected:
        raise IntegrityError(f"{expected} requests and tokens never ran. Counted {found}.")
    places = Counter(live.key for live in [*roster.waiting, *roster.running])
    for request_id, owner in roster.requests.items():
        if not owner.members or owner.request.request_id != request_id:
            raise IntegrityError(f"request {request_id!r} must have a sequence that is not ended.")
        for i, live in enumerate(owner.members):
            expected = 1 if owner.is_forked or i == 0 else 0
            found = places.pop(live.key, 0)
            if found != expected or roster.live.get(live.sequence) is not live:
                raise IntegrityError(
                    f"sequence {live.key} must be in {expected} queues. Got {found}."
                )
    members = sum(len(owner.members) for owner in roster.requests.values())
    if places or members != len(roster.live):
        raise IntegrityError(
            f"{sorted(places)} are queued without a request, or {members} members are not the "
            f"{len(roster.live)} live sequences."
        )


def _check_slots(config: SchedulerConfig, roster: Roster) -> None:
    held = [live.sequence.slot for live in roster.running]
    slots = sorted([*roster.free_slots, *(slot for slot in held if slot is not None)])
    if None in held or slots != list(range(config.max_num_seqs)):
        raise IntegrityError(
            f"each slot must be free or held once. Got free {roster.free_slots}, held {held}."
        )
    if roster.free_slots != sorted(roster.free_slots):
        raise IntegrityError(f"free slots must ascend. Got {roster.free_slots}.")
    promised = sum(live.width - 1 for live in roster.running)
    if promised > len(roster.free_slots):
        raise IntegrityError(
            f"{promised} slots are promised to forks, {len(roster.free_slots)} are free."
        )


def _check_waiting(live: LiveSequence, config: SchedulerConfig) -> None:
    sequence, table = live.sequence, live.table
    facts = (sequence.status, sequence.slot, table.pages, live.capacity, live.restored)
    if facts != (SequenceStatus.WAITING, None, [], 0, None) or live.in_flight or live.ahead:
        raise IntegrityError(
            f"waiting sequence {live.key} must hold nothing of the device. Got (status, slot, "
            f"pages, capacity, restored): {facts}, in flight: {live.in_flight is not None}."
        )
    computed = sequence.num_computed_tokens
    most = sequence.num_tokens - (live.offers is None)  # an idle lane has nothing to run
    if len(live.host_pages) != -(-computed // config.page_size) or computed > most:
        raise IntegrityError(
            f"waiting sequence {live.key} must have its {computed} computed positions of "
            f"{sequence.num_tokens} on the host. Got {len(live.host_pages)} host pages."
        )


def _check_running(
    live: LiveSequence, config: SchedulerConfig, allocator: PageAllocator, builder: PlanBuilder
) -> None:
    sequence, pages, size = live.sequence, live.table.pages, config.page_size
    num_host = -(-sequence.num_computed_tokens // size)
    if live.host_pages and (live.restored is None or len(live.host_pages) != num_host):
        raise IntegrityError(
            f"running sequence {live.key} must have no host pages, or {num_host} while they are "
            f"brought in. Got {live.host_pages}, brought in {live.restored}."
        )
    flight = live.num_in_flight
    drawn = live.in_flight.num_samples if live.in_flight is not None and live.ahead else 0
    computed = sequence.num_computed_tokens
    expected = -(-(computed + flight) // size)
    if len(pages) != expected or live.capacity != expected * size:
        raise IntegrityError(
            f"sequence {live.key} must hold {expected} pages for {computed} computed and {flight} "
            f"scheduled positions. Got {len(pages)}, capacity {live.capacity}."
        )
    is_idle = not flight and computed == sequence.num_tokens
    if computed + flight > sequence.num_tokens + drawn or is_idle != (live.offers is not None):
        raise IntegrityError(
            f"sequence {live.key} must have a token to run. Got {computed} computed and {flight} "
            f"scheduled of {sequence.num_tokens}."
        )
    if sequence.slot is None or builder.pages_of(sequence.slot, len(pages)) != pages:
        raise IntegrityError(f"slot {sequence.slot} must show the pages of sequence {live.key}.")
    if not builder.has_slot_of(live):
        raise IntegrityError(f"slot {sequence.slot} must sample as sequence {live.key} asks.")
    first = computed // size
    unwritable = [
        page
        for page in pages[first:]
        if allocator.references(page) > 1 or allocator.is_cached(page)
    ]
    if unwritable and not (live.shares_tail and unwritable == pages[-1:]):
        raise IntegrityError(f"sequence {live.key} would write pages of others: {unwritable}.")
    if sequence.num_tokens > config.max_model_len:
        raise IntegrityError(
            f"sequence {live.key} must have at most {config.max_model_len} tokens. "
            f"Got {sequence.num_tokens}."
        )
