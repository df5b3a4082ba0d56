"""The scheduler: which sequences run in the next step, and what becomes of what they sampled.

Joins the parts in `scheduling/` into one step: `schedule` (a whole plan, or nothing changed), the
runner's work, and `update`. Knows nothing of devices, text or clocks.

A sequence is in exactly one place::

    add_request --> waiting --schedule--> running --update, finish, abort--> finished
                       ^                     |
                       +----- preempted -----+

A preempted sequence comes back from its pages on the host (swap), or computes again what the
prefix cache does not have (recompute); either way nothing else changes for it.

Of a request with n samples only the first sequence queues. It computes the prompt once; when it
draws n tokens at the end of it, the others fork off, sharing its pages, and live on their own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import replace

from pagedjax.config import SchedulerConfig
from pagedjax.errors import RequestError
from pagedjax.events import EventSink
from pagedjax.paging import HostTier, PrefixCache
from pagedjax.plan import RowUpdate, StepPlan, StepResult
from pagedjax.request import FinishReason, Request, Sequence
from pagedjax.scheduling import integrity
from pagedjax.scheduling.adjustments import BanState
from pagedjax.scheduling.beams import lane_to_park
from pagedjax.scheduling.cost_model import CostModel
from pagedjax.scheduling.draft import StepDraft
from pagedjax.scheduling.journal import JournaledAllocator
from pagedjax.scheduling.live import LiveSequence, check_request
from pagedjax.scheduling.page_mover import PageMover
from pagedjax.scheduling.page_work import PageWork
from pagedjax.scheduling.pins import Pins
from pagedjax.scheduling.plan_builder import PlanBuilder
from pagedjax.scheduling.recorder import Recorder, name_of
from pagedjax.scheduling.result_reader import Readback, ResultReader
from pagedjax.scheduling.roster import Roster
from pagedjax.scheduling.stats import SchedulerStats, SwapStats

logger = logging.getLogger("pagedjax")


class Scheduler:
    """Continuous batching over pages: `add_request`, then `schedule` and `update` in turn.

    Attributes:
      events: what records all that is asked and decided; None: nothing is recorded.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        prefix_cache_root: bytes | None = None,
        events: EventSink | None = None,
    ):
        """Makes all page records.

        Args:
          config: resolved sizes.
          prefix_cache_root: secret of the prefix cache's hashes; drawn at random unless given.
          events: is told all that is asked and decided; None: nobody is.
        """
        self.config = config
        self.allocator = JournaledAllocator(config.num_pages)
        self.prefix_cache = PrefixCache(
            self.allocator,
            config.page_size,
            root=prefix_cache_root,
            enabled=config.enable_prefix_caching,
        )
        host_allocator = JournaledAllocator(config.num_host_pages + 1)
        self.host = HostTier(host_allocator)
        self.costs = CostModel()
        self.pins = Pins(config, self.allocator, self.prefix_cache)
        self.roster = Roster(config, self.allocator, self.prefix_cache, self.host)
        self._builder = PlanBuilder(config)
        self._mover = PageMover(
            config, self.allocator, host_allocator, self.prefix_cache, self.host, self._builder
        )
        self._reader = ResultReader(
            config, self.allocator, self.prefix_cache, self.host, self.roster, self._builder
        )
        self._swap = SwapStats(num_host_pages=config.num_host_pages)
        self._awaited: set[int] = set()  # steps whose result was not read
        self._num_steps = 0
        self._num_requests = self._num_preemptions = self._num_cow_copies = 0
        self.events = None
        if events is not None:
            pools = (self.allocator, host_allocator)
            self.events = Recorder(events, config, pools=pools, costs=self.costs)
        self.roster.events = self.roster.swapped.events = self.pins.events = self.events

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
        """Totals since the start, and use of the pools now."""
        hits, host = self.prefix_cache.stats, self.host.allocator
        swap = replace(
            self._swap,
            num_recomputed_tokens=self.roster.num_recomputed_tokens,
            num_lost_pages=self.roster.swapped.num_lost_pages,
            num_held_host_pages=host.num_held,
            num_cached_host_pages=host.num_evictable,
        )
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
            num_saved_pages=self.allocator.num_references - self.allocator.num_held,
            swap=swap,
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
        if self.events is not None:
            self.events.added(request)
        self._num_requests += 1
        return [live.sequence for live in owner.members]

    def schedule(self, only: Set[str] | None = None) -> StepPlan | None:
        """Plans the next step; None when nothing can run now.

        A transaction: what raises in it leaves everything as it was.

        A step may be planned before the last one was read. A sequence whose token is awaited goes
        on from where the device has it, once, if nothing that the token may be could matter to
        the plan but its end (then the step is wasted for it); others are left out. Nobody is
        preempted meanwhile: the plan is None then, and what is awaited must be read first.

        Args:
          only: ids of requests; all others queue, and none of theirs is planned. None: all run.
        """
        roster = self.roster
        waiting = roster.waiting
        if only is not None:
            if self.events is not None:
                self.events.called("schedule", only=sorted(only))
            self._num_preemptions += roster.preempt_all(but=only)
            waiting = [live for live in waiting if live.sequence.request.request_id in only]
        draft, parked = self._draft(waiting, ()), list[LiveSequence]()
        while not draft.must_wait and (lane := lane_to_park(draft, roster, parked)) is not None:
            parked.append(lane)
            draft = self._draft(waiting, parked)
        if draft.must_wait or not draft.scheduled:
            if self.events is not None and not draft.must_wait:
                self.events.stalled(draft)
            return None
        draft.step = self._num_steps + 1
        slots = dict(zip(draft.lives, draft.slots, strict=True))
        bans = _new_bans(slots)
        try:
            with self._mover.transaction():
                work = self._mover.take(draft, slots)
                plan = self._builder.build(draft, work, _row_updates(bans, slots))
        except BaseException:
            for live in roster.running:
                self._builder.set_pages(live)
            for live in parked:  # another one was to have the slot
                self._builder.set_slot(live.held_slot, live)
            raise
        if self.events is not None:
            self.events.planned(plan, draft)
        self._num_steps += 1
        self._awaited.add(plan.step)
        self._num_preemptions += len(draft.victims)
        self._num_cow_copies += len(work.copies)
        _count_swaps(self._swap, draft, work, self.config.page_size)
        self._mover.settle(work)
        _commit(draft, work, slots, roster)
        for live, state in bans.items():
            live.row_state = state
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[Sequence]:
        """Takes in what a step sampled; results come in the order of their plans.

        What was preempted, aborted or finished since the plan was made is dropped, and so is a
        result that was already read. A sequence whose result cannot be handled fails alone.

        Returns:
          the sequences that got a token or ended, in the plan's order.
        """
        if plan.step not in self._awaited:
            return []
        if plan.step != min(self._awaited):
            raise ValueError(
                f"`plan` must be the oldest without a result, step {min(self._awaited)}. "
                f"Got step {plan.step}."
            )
        self._awaited.remove(plan.step)
        if self.events is not None:
            self.events.result(plan, result)
        self._lose(result.lost_host_pages)
        advanced: list[Sequence] = []
        readback = Readback(result)
        for scheduled in plan.scheduled:
            live = self.roster.live.get(scheduled.sequence)
            if live is None or live.in_flight is not scheduled:
                continue
            try:
                reads_token = scheduled is live.decode_note and live.owner.reports_tokens_only
                if reads_token and not readback.has_corrupted:
                    self._reader.read_token(live, readback.tokens[scheduled.first_row])
                    advanced.append(live.sequence)
                else:
                    advanced += self._reader.read(live, scheduled, readback)
            except Exception as error:
                logger.exception("request %s failed", live.sequence.request.request_id)
                message = f"internal error in this request ({type(error).__name__}); see the log"
                advanced += self.roster.close_all(live.owner, FinishReason.ERROR, message)
        return advanced

    def drop(
        self, plan: StepPlan, *, lost: frozenset[int] = frozenset(), has_run: bool = True
    ) -> None:
        """Says that no result will come of a plan: what it scheduled is scheduled again.

        Plans made after it are dropped before it. Host pages that it was to fill are lost. Its
        sequences' pages may hold anything now, so they are given up and computed again, or brought
        in again by those that were swapped; registered pages hold what they held.

        Args:
          lost: host pages whose content turned out to be lost; who waits with one computes again.
          has_run: False when neither its page copies nor anything after them was begun, as after
            a `TransferError`: only sequences that were to get pages from the host or copies of
            pages queue again then, and all others keep what they have. Host pages that it was to
            read count as lost unless `lost` names some.
        """
        self._awaited.discard(plan.step)
        if self.events is not None:
            self.events.dropped(plan, lost, has_run=has_run)
        if not has_run and not lost:
            lost = frozenset(move.host_page for move in plan.swaps_in)
        self._lose(lost | {move.host_page for move in plan.swaps_out})
        missing = {copy.dst for copy in plan.copies} | {move.page for move in plan.swaps_in}
        for scheduled in plan.scheduled:
            live = self.roster.live.get(scheduled.sequence)
            if live is None or (live.ahead or live.in_flight) is not scheduled:
                continue
            if has_run or live.host_pages or not missing.isdisjoint(live.table.pages):
                live.table.release()
                self.roster.requeue(live)
            else:
                live.rewind()

    def forget_device_pages(self) -> None:
        """Says that pages and sampler rows of the device hold nothing any more.

        What ran is computed again, the prefix cache forgets the pages of the device, and nothing is
        pinned any more.
        """
        if self.events is not None:
            self.events.called("forget_device_pages")
        self._num_preemptions += self.roster.preempt_all()
        if self.pins.clear():
            logger.warning("the device lost its pages: nothing is pinned any more")
        self.prefix_cache.reset()

    def finish(
        self, sequence: Sequence, reason: FinishReason, *, stop_reason: int | str | None = None
    ) -> None:
        """Ends one sequence, at any moment; nothing happens when it has ended before."""
        live = self.roster.live.get(sequence)
        if live is not None and self.events is not None:
            self.events.called("finish", sequence=name_of(sequence), reason=reason.value)
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
            if self.events is not None:
                self.events.called("fail", target=request_id, message=message, reason=reason.value)
            self.roster.close_all(owner, reason, message)

    def abort(self, request_id: str) -> bool:
        """Cancels a request at any moment; False when no such request is in flight."""
        owner = self.roster.requests.get(request_id)
        if owner is None:
            return False
        if self.events is not None:
            self.events.called("abort", request_id=request_id)
        self.roster.close_all(owner, FinishReason.ABORT)
        return True

    def reset_prefix_cache(self, *, reset_running: bool = False) -> bool:
        """Forgets all cached prefixes, on the device and on the host, pinned ones too.

        Args:
          reset_running: preempt what runs, and what is swapped, to be computed again; results in
            flight are void.

        Returns:
          False, and nothing changed, while a sequence has pages, of the device or of the host.
        """
        # One that runs has none after a step that never was: it is no reason to refuse.
        has_pages = any(live.table.num_pages for live in self.roster.running)
        if not reset_running and (has_pages or self.host.allocator.num_held):
            return False
        if self.events is not None:
            self.events.called("reset_prefix_cache", reset_running=reset_running)
        if reset_running:
            self._num_preemptions += self.roster.preempt_all()
            for live in self.roster.waiting:
                self.roster.swapped.forget(live)
        if self.pins.clear():
            logger.info("the prefix cache was reset: nothing is pinned any more")
        self.host.reset()
        return self.prefix_cache.reset()

    def check_integrity(self) -> None:
        """Raises `IntegrityError` when pages, queues, slots and sequences do not agree."""
        integrity.check_integrity(
            self.config,
            self.allocator,
            self.prefix_cache,
            self.host,
            self.roster,
            self._builder,
            self.pins,
        )

    def assert_empty(self) -> None:
        """Raises `IntegrityError` when anything is left of the requests that ended."""
        integrity.check_empty(self.config, self.allocator, self.host, self.roster, self.pins)

    def _lose(self, lost: frozenset[int]) -> None:
        self.roster.swapped.lose(lost, self.roster.waiting, self.roster.running)

    def _draft(self, waiting: Seq[LiveSequence], parked: Seq[LiveSequence]) -> StepDraft:
        """A step in which these idle lanes of beam searches give their pages and slots up."""
        roster = self.roster
        draft = StepDraft(
            self.config,
            self.allocator,
            self.prefix_cache,
            self.host,
            self.costs,
            is_ahead=bool(self._awaited),
        )
        running, free_slots = roster.running, roster.free_slots
        if parked:
            running = [live for live in running if live not in parked]
            free_slots = sorted([*free_slots, *(live.held_slot for live in parked)])
        for live in parked:
            draft.park(live)
        draft.schedule_running(running)
        draft.admit(waiting, running, free_slots)
        return draft


def _count_swaps(swap: SwapStats, draft: StepDraft, work: PageWork, page_size: int) -> None:
    """Counts what a step moves; before it is committed."""
    swapped = [victim.live for victim in draft.victims if victim.mode == "swap"]
    swap.num_swaps += len(swapped)
    swap.num_tokens_out += sum(live.sequence.num_computed_tokens for live in swapped)
    swap.num_spilled_pages += len(work.spilled)
    swap.num_pages_out += len(work.swaps_out) - len(work.spilled)
    swap.num_pages_in += len(work.swaps_in)
    for admission in draft.admitted:
        if admission.live.host_pages:
            swap.num_tokens_in += admission.num_tokens
        elif not admission.live.owner.was_admitted:
            swap.num_hit_tokens += page_size * sum(map(bool, admission.hits.host_pages))


def _commit(
    draft: StepDraft, work: PageWork, slots: Mapping[LiveSequence, int], roster: Roster
) -> None:
    """What the draft decided, once nothing can fail any more."""
    for victim in draft.victims:
        roster.requeue(victim.live, work.host_tables.get(victim.live, ()))
        victim.live.sequence.num_preemptions += 1
    for admission in draft.admitted:
        live = admission.live
        roster.enter(live, slots[live], admission.num_tokens)
        live.restored = work.restored.get(live)
    for live, _ in draft.grown:
        live.capacity = live.table.capacity
        live.shares_tail = False
    for at in draft.special:
        if draft.scheduled[at].num_samples > 1:
            owner = draft.lives[at].owner
            owner.drawn = tuple(member.sequence.sample for member in owner.members)
    for live, scheduled in zip(draft.lives, draft.scheduled, strict=True):
        if live.in_flight is None:
            live.in_flight = scheduled
        else:
            live.ahead = scheduled


def _new_bans(slots: Mapping[LiveSequence, int]) -> dict[LiveSequence, BanState]:
    """The scheduled sequences whose slot's sampler row must be written, and what for."""
    found: dict[LiveSequence, BanState] = {}
    for live in slots:
        adjustments = live.owner.adjustments
        if adjustments is not None and live.in_flight is None:
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
