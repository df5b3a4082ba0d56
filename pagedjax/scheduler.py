"""The scheduler: which sequences run in the next step, and what becomes of what they sampled.

Joins the parts in `scheduling/` into one step: `schedule` (a whole plan, or nothing changed), the
runner's work, and `update`. Knows nothing of devices, text or clocks.

A sequence is in exactly one place::

    add_request --> waiting --schedule--> running --update, finish, abort--> finished
                       ^                     |
                       +----- preempted -----+

Of a request with n samples only the first sequence queues. It computes the prompt once; when it
draws n tokens at the end of it, the others fork off, sharing its pages, and live on their own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from pagedjax.config import SchedulerConfig
from pagedjax.errors import RequestError
from pagedjax.paging import PrefixCache
from pagedjax.plan import PageCopy, RowUpdate, StepPlan, StepResult
from pagedjax.request import FinishReason, Request, Sequence
from pagedjax.scheduling import integrity
from pagedjax.scheduling.adjustments import BanState
from pagedjax.scheduling.beams import lane_to_park
from pagedjax.scheduling.draft import StepDraft
from pagedjax.scheduling.journal import JournaledAllocator
from pagedjax.scheduling.live import LiveSequence, check_request
from pagedjax.scheduling.pins import PinnedPrefix, Pins
from pagedjax.scheduling.plan_builder import PlanBuilder
from pagedjax.scheduling.result_reader import Readback, ResultReader
from pagedjax.scheduling.roster import Roster

logger = logging.getLogger("pagedjax")


@dataclass(slots=True, kw_only=True)
class SchedulerStats:
    """Totals since the start, and use of the pool now."""

    num_requests: int
    num_preemptions: int
    num_cow_copies: int
    num_prompt_tokens: int  # prompt positions computed
    num_generated_tokens: int
    prefix_query_tokens: int  # prompt tokens looked up, each request once
    prefix_hit_tokens: int
    num_pages: int  # that can be used
    num_held_pages: int  # of those, now
    pinned: tuple[PinnedPrefix, ...] = ()  # prefixes that are held for later requests

    @property
    def kv_usage(self) -> float:
        """Share of the pool's pages that sequences hold, 0 to 1."""
        return self.num_held_pages / max(self.num_pages, 1)

    @property
    def prefix_hit_rate(self) -> float:
        """Share of prompt tokens found in the prefix cache, 0 to 1."""
        return self.prefix_hit_tokens / max(self.prefix_query_tokens, 1)


class Scheduler:
    """Continuous batching over pages: `add_request`, then `schedule` and `update` in turn."""

    def __init__(self, config: SchedulerConfig, *, prefix_cache_root: bytes | None = None):
        """Makes all page records.

        Args:
          config: resolved sizes.
          prefix_cache_root: secret of the prefix cache's hashes; drawn at random unless given.
        """
        self.config = config
        self.allocator = JournaledAllocator(config.num_pages)
        self.prefix_cache = PrefixCache(
            self.allocator,
            config.page_size,
            root=prefix_cache_root,
            enabled=config.enable_prefix_caching,
        )
        self.pins = Pins(config, self.allocator, self.prefix_cache)
        self.roster = Roster(config, self.allocator, self.prefix_cache)
        self._builder = PlanBuilder(config)
        self._reader = ResultReader(
            config, self.allocator, self.prefix_cache, self.roster, self._builder
        )
        self._awaited: set[int] = set()  # steps whose result was not read
        self._num_steps = 0
        self._num_requests = self._num_preemptions = self._num_cow_copies = 0

    @property
    def has_work(self) -> bool:
        """True while a sequence is not finished."""
        return bool(self.roster.live)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self.roster.running)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue; the samples of a request queue as one until they fork."""
        return len(self.roster.waiting)

    @property
    def stats(self) -> SchedulerStats:
        """Totals since the start, and use of the pool now."""
        hits = self.prefix_cache.stats
        return SchedulerStats(
            num_requests=self._num_requests,
            num_preemptions=self._num_preemptions,
            num_cow_copies=self._num_cow_copies,
            num_prompt_tokens=self._reader.num_prompt_tokens,
            num_generated_tokens=self._reader.num_generated_tokens,
            prefix_query_tokens=hits.num_query_tokens,
            prefix_hit_tokens=hits.num_hit_tokens,
            num_pages=self.allocator.usable,
            num_held_pages=self.allocator.num_held,
            pinned=self.pins.listing,
        )

    def add_request(self, request: Request) -> list[Sequence]:
        """Queues a request and returns its n sequences.

        Raises:
          RequestError: it can never be served as asked, its id is in use, or (code "queue_full")
            too much waits already.
        """
        if request.request_id in self.roster.requests:
            raise RequestError(
                f"`request_id` must not be in use. Got {request.request_id!r} twice.",
                param="request_id",
            )
        check_request(request, self.config)
        self.roster.check_room()
        owner = self.roster.add(request)
        self._num_requests += 1
        return [live.sequence for live in owner.members]

    def schedule(self, only: Set[str] | None = None) -> StepPlan | None:
        """Plans the next step; None when nothing can run now.

        A transaction: what raises in it leaves everything as it was. Sequences whose result is
        still awaited are left out, so a step may be planned before the last one was read.

        Args:
          only: ids of requests; all others queue, and none of theirs is planned. None: all run.
        """
        roster = self.roster
        waiting = roster.waiting
        if only is not None:
            self._num_preemptions += roster.preempt_all(but=only)
            waiting = [live for live in waiting if live.sequence.request.request_id in only]
        draft, parked = self._draft(waiting, ()), list[LiveSequence]()
        while (lane := lane_to_park(draft, roster, parked)) is not None:
            parked.append(lane)
            draft = self._draft(waiting, parked)
        if not draft.scheduled:
            return None
        draft.step = self._num_steps + 1
        slots = dict(zip(draft.lives, draft.slots, strict=True))
        bans = _new_bans(slots)
        try:
            with self.allocator.transaction():
                copies = self._take_pages(draft, slots)
                plan = self._builder.build(draft, copies, _row_updates(bans, slots))
        except BaseException:
            for live in roster.running:
                self._builder.set_pages(live)
            for live in parked:  # another one was to have the slot
                self._builder.set_slot(live.held_slot, live)
            raise
        _commit(draft, slots, roster, self.config.page_size)
        self._num_steps += 1
        self._awaited.add(plan.step)
        for live, state in bans.items():
            live.row_state = state
        self._num_preemptions += len(draft.victims)
        self._num_cow_copies += len(copies)
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[Sequence]:
        """Takes in what a step sampled.

        What was preempted, aborted or finished since the plan was made is dropped, and so is a
        result that was already read. A sequence whose result cannot be handled fails alone.

        Returns:
          the sequences that got a token or ended, in the plan's order.
        """
        if plan.step not in self._awaited:
            return []
        self._awaited.remove(plan.step)
        advanced: list[Sequence] = []
        readback = Readback(result)
        for scheduled in plan.scheduled:
            live = self.roster.live.get(scheduled.sequence)
            if live is None or live.in_flight is not scheduled:
                continue
            try:
                advanced += self._reader.read(live, scheduled, readback)
            except Exception as error:
                logger.exception("request %s failed", live.sequence.request.request_id)
                message = f"internal error in this request ({type(error).__name__}); see the log"
                advanced += self.roster.close_all(live.owner, FinishReason.ERROR, message)
        return advanced

    def drop(self, plan: StepPlan) -> None:
        """Says that a plan's step failed or never ran: what it scheduled starts over.

        Pages of its sequences may hold anything now, so they are given up and computed again;
        registered pages hold what they held.
        """
        self._awaited.discard(plan.step)
        for scheduled in plan.scheduled:
            live = self.roster.live.get(scheduled.sequence)
            if live is not None and live.in_flight is scheduled:
                live.table.release()
                self.roster.requeue(live)

    def forget_device_pages(self) -> None:
        """Says that pages and sampler rows of the device hold nothing any more.

        What ran is computed again, the prefix cache forgets the pages of the device, and nothing is
        pinned any more.
        """
        self._num_preemptions += self.roster.preempt_all()
        if self.pins.clear():
            logger.warning("the device lost its pages: nothing is pinned any more")
        self.prefix_cache.reset()

    def finish(
        self, sequence: Sequence, reason: FinishReason, *, stop_reason: int | str | None = None
    ) -> None:
        """Ends one sequence, at any moment; nothing happens when it has ended before."""
        live = self.roster.live.get(sequence)
        if live is not None and live.owner.beams is not None:  # no lane goes on without the others
            self.roster.close_all(live.owner, reason)
        elif live is not None:
            sequence.stop_reason = stop_reason
            self.roster.close(live, reason)

    def fail(
        self,
        target: Sequence | str,
        message: str,
        *,
        reason: FinishReason = FinishReason.ERROR,
    ) -> None:
        """Ends a request, given by its id or one of its sequences, with an error of its own."""
        request_id = target if isinstance(target, str) else target.request.request_id
        owner = self.roster.requests.get(request_id)
        if owner is not None:
            self.roster.close_all(owner, reason, message)

    def abort(self, request_id: str) -> bool:
        """Cancels a request at any moment; False when no such request is in flight."""
        owner = self.roster.requests.get(request_id)
        if owner is None:
            return False
        self.roster.close_all(owner, FinishReason.ABORT)
        return True

    def reset_prefix_cache(self, *, reset_running: bool = False) -> bool:
        """Forgets all cached prefixes, pinned ones too.

        Args:
          reset_running: preempt what runs, to be computed again; results in flight are void.

        Returns:
          False, and nothing changed, while a sequence has pages.
        """
        if reset_running:
            self._num_preemptions += self.roster.preempt_all()
        if self.roster.running:
            return False
        if self.pins.clear():
            logger.info("the prefix cache was reset: nothing is pinned any more")
        return self.prefix_cache.reset()

    def check_integrity(self) -> None:
        """Raises `IntegrityError` when pages, queues, slots and sequences do not agree."""
        integrity.check_integrity(
            self.config, self.allocator, self.prefix_cache, self.roster, self._builder, self.pins
        )

    def assert_empty(self) -> None:
        """Raises `IntegrityError` when anything is left of the requests that ended."""
        integrity.check_empty(self.config, self.allocator, self.roster, self.pins)

    def _draft(self, waiting: Seq[LiveSequence], parked: Seq[LiveSequence]) -> StepDraft:
        """A step in which these idle lanes of beam searches give their pages and slots up."""
        roster = self.roster
        draft = StepDraft(self.config, self.allocator, self.prefix_cache)
        running, free_slots = roster.running, roster.free_slots
        if parked:
            running = [live for live in running if live not in parked]
            free_slots = sorted([*free_slots, *(live.held_slot for live in parked)])
        for live in parked:
            draft.park(live)
        draft.schedule_running(running)
        draft.admit(waiting, running, free_slots)
        return draft

    def _take_pages(self, draft: StepDraft, slots: Mapping[LiveSequence, int]) -> list[PageCopy]:
        """Does with pages what the draft decided; inside a transaction."""
        for live in draft.victims:
            live.table.save()
            live.table.release()
        for live, hits in draft.admitted:  # before anything is allocated: that could evict a hit
            live.table.save()
            live.table.adopt(hits, len(hits) * self.config.page_size)
            self._builder.set_slot(slots[live], live)
        copies = [live.grow(total) for live, total in draft.grown]
        for live, _ in draft.grown:
            self._builder.set_pages(live, slots[live])
        return [copy for copy in copies if copy is not None]


def _commit(
    draft: StepDraft, slots: Mapping[LiveSequence, int], roster: Roster, page_size: int
) -> None:
    """What the draft decided, once nothing can fail any more."""
    for live in draft.victims:
        roster.requeue(live)
        live.sequence.num_preemptions += 1
    for live, hits in draft.admitted:
        roster.enter(live, slots[live], len(hits) * page_size)
    for live, _ in draft.grown:
        live.capacity = live.table.capacity
        live.shares_tail = False
    for live, scheduled in zip(draft.lives, draft.scheduled, strict=True):
        live.in_flight = scheduled


def _new_bans(slots: Mapping[LiveSequence, int]) -> dict[LiveSequence, BanState]:
    """The scheduled sequences whose slot's sampler row must be written, and what for."""
    found: dict[LiveSequence, BanState] = {}
    for live in slots:
        adjustments = live.owner.adjustments
        if adjustments is not None:
            state = adjustments.state(live.sequence)
            if state != live.row_state:
                found[live] = state
    return found


def _row_updates(
    bans: Mapping[LiveSequence, BanState], slots: Mapping[LiveSequence, int]
) -> list[RowUpdate]:
    return [
        live.owner.adjustments.row_update(slots[live], live.sequence, state)
        for live, state in bans.items()
        if live.owner.adjustments is not None
    ]
