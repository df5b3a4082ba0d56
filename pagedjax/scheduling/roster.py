"""Who waits, who runs, and in which slot; every change of a sequence's status is made here.

Owns the queues, the free slots and the requests in flight. Knows nothing of budgets, of tokens or
of why a sequence moves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Set

from pagedjax.config import SchedulerConfig
from pagedjax.errors import IntegrityError, RequestError
from pagedjax.paging import HostTier, PrefixCache
from pagedjax.request import FinishReason, Request, Sequence, SequenceStatus
from pagedjax.scheduling.adjustments import Adjustments
from pagedjax.scheduling.beam_search import BeamSearch
from pagedjax.scheduling.journal import JournaledAllocator, JournaledTable
from pagedjax.scheduling.live import LiveRequest, LiveSequence, SequenceKey, rank_of
from pagedjax.scheduling.recorder import Recorder
from pagedjax.scheduling.swapped import Swapped


class Roster:
    """Requests in flight and where their sequences are.

    Attributes:
      requests: by request id, while a sequence of them is not finished.
      live: the record of each sequence that is not finished.
      waiting, running: by key, (rank, arrival, sample). Of a request that has not forked only the
        first sequence is in either; it stands for the others.
      free_slots: ascending.
      num_queued_requests, num_queued_tokens: requests that never ran, and their prompt tokens.
        What was preempted waits too, but the queue's limits are about newcomers.
      num_recomputed_tokens: positions of preempted sequences that were to be computed again.
      swapped: what becomes of host pages of sequences that wait.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        allocator: JournaledAllocator,
        cache: PrefixCache,
        host: HostTier,
    ):
        """Starts empty."""
        self.requests: dict[str, LiveRequest] = {}
        self.live: dict[Sequence, LiveSequence] = {}
        self.waiting: list[LiveSequence] = []
        self.running: list[LiveSequence] = []
        self.free_slots = list(range(config.max_num_seqs))
        self.num_queued_requests = self.num_queued_tokens = 0
        self.events: Recorder | None = None  # hears of sequences that end or start over
        self._config = config
        self._allocator = allocator
        self._cache = cache
        self.swapped = Swapped(host)
        self.num_recomputed_tokens = 0

    @property
    def has_room(self) -> bool:
        """True while the limits of the queue let a newcomer in, however long it is."""
        most_requests = self._config.max_queue_requests
        most_tokens = self._config.max_queue_tokens
        return (most_requests is None or self.num_queued_requests < most_requests) and (
            most_tokens is None or self.num_queued_tokens < most_tokens
        )

    def check_room(self) -> None:
        """Raises `RequestError` of code "queue_full" when there is no room."""
        if not self.has_room:
            raise RequestError(
                "the queue must have room for a request: `max_queue_requests` is "
                f"{self._config.max_queue_requests}, `max_queue_tokens` "
                f"{self._config.max_queue_tokens}. Got {self.num_queued_requests} requests with "
                f"{self.num_queued_tokens} prompt tokens that wait already. Try again later.",
                code="queue_full",
            )

    def add(self, request: Request) -> LiveRequest:
        """Queues a checked request."""
        owner = _new_request(request, self._config, self._allocator, self._cache)
        self.requests[request.request_id] = owner
        self.live.update({member.sequence: member for member in owner.members})
        insort(self.waiting, owner.members[0], key=_key)
        self._count_queued(owner, 1)
        return owner

    def enter(self, live: LiveSequence, slot: int, num_computed_tokens: int) -> None:
        """From waiting to running, with so many tokens found in the prefix cache, or swapped."""
        owner, sequence = live.owner, live.sequence
        _remove(self.waiting, live)
        self.num_recomputed_tokens += max(0, live.num_lost_tokens - num_computed_tokens)
        live.num_lost_tokens = 0
        self.take_slot(live, slot)
        sequence.num_computed_tokens = num_computed_tokens
        if owner.was_admitted:
            return
        owner.was_admitted = True
        self._count_queued(owner, -1)
        for member in owner.members:
            member.sequence.num_cached_tokens = num_computed_tokens
        if owner.may_read_cache(sequence) and self._cache.enabled:
            self._cache.stats.record(sequence.num_prompt_tokens, num_computed_tokens)

    def take_slot(self, live: LiveSequence, slot: int) -> None:
        """Makes a sequence that is in no queue run."""
        self.free_slots.remove(slot)
        live.sequence.slot = slot
        live.sequence.status = SequenceStatus.RUNNING
        insort(self.running, live, key=_key)

    def unpromised_slots(self) -> list[int]:
        """Free slots that no fork to come counts on, ascending."""
        promised = sum(live.width - 1 for live in self.running)
        return self.free_slots[: len(self.free_slots) - promised]

    def go_on(self, live: LiveSequence, slot: int) -> None:
        """A lane that waits, or is in no queue yet, runs at once, on the pages of a running one."""
        at = bisect_left(self.waiting, live.key, key=_key)
        if at < len(self.waiting) and self.waiting[at] is live:
            del self.waiting[at]
        self.take_slot(live, slot)

    def requeue(self, live: LiveSequence, host_pages: tuple[int, ...] = ()) -> None:
        """From running, its pages released, to its place by age in waiting.

        `host_pages` hold what it has computed, a reference each. Without any, and without such
        that it had before, it starts over.
        """
        self._leave(live)
        if host_pages:
            live.host_pages = host_pages
        if not live.host_pages:
            live.start_over()
        live.sequence.status = SequenceStatus.WAITING
        if self.events is not None:
            self.events.restarted(live)
        insort(self.waiting, live, key=_key)

    def preempt_all(self, but: Set[str] = frozenset()) -> int:
        """Takes all that runs, `but` these requests, back to waiting, to be computed again.

        Returns:
          how many sequences.
        """
        preempted = [live for live in self.running if live.owner.request.request_id not in but]
        for live in preempted:
            live.table.release()
            self.requeue(live)
            live.sequence.num_preemptions += 1
        return len(preempted)

    def close(self, live: LiveSequence, reason: FinishReason) -> None:
        """Ends a sequence and frees all that it holds. It is in `live` once, so it ends once."""
        sequence, owner = live.sequence, live.owner
        was_leader = live.is_leader and live is owner.members[0]
        del self.live[sequence]
        owner.members.remove(live)
        live.table.release()
        self.swapped.release(live)
        if sequence.status is SequenceStatus.RUNNING:
            self._leave(live)
        elif was_leader or owner.is_forked:
            _remove(self.waiting, live)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        if self.events is not None:
            self.events.ended(sequence)
        if not owner.members:
            del self.requests[sequence.request.request_id]
            if not owner.was_admitted:
                self._count_queued(owner, -1)
        elif was_leader:  # the prompt is left to the next of its samples
            insort(self.waiting, owner.members[0], key=_key)

    def close_all(
        self, owner: LiveRequest, reason: FinishReason, error: str | None = None
    ) -> list[Sequence]:
        """Ends every sequence of a request that has not ended; returns them."""
        ended = [live.sequence for live in owner.members]
        for live in reversed(list(owner.members)):  # a leader last, or it would be replaced
            live.sequence.error = error
            self.close(live, reason)
        return ended

    def _count_queued(self, owner: LiveRequest, sign: int) -> None:
        self.num_queued_requests += sign
        self.num_queued_tokens += sign * len(owner.request.prompt_token_ids)

    def _leave(self, live: LiveSequence) -> None:
        """Out of running: its slot is free, and results in flight are void."""
        sequence = live.sequence
        _remove(self.running, live)
        if sequence.slot is not None:
            insort(self.free_slots, sequence.slot)
        sequence.slot = None
        sequence.epoch += 1
        live.in_flight = live.ahead = live.row_state = None
        live.capacity = 0
        live.shares_tail = False
        live.restored = None


def _new_request(
    request: Request, config: SchedulerConfig, allocator: JournaledAllocator, cache: PrefixCache
) -> LiveRequest:
    params = request.params
    num_prompt = len(request.prompt_token_ids)
    room = config.max_model_len - num_prompt
    owner = LiveRequest(
        request=request,
        max_output_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
        stop_ids=request.stop_ids,
        adjustments=Adjustments.of(request, config.vocab_size),
        is_forked=params.num_sequences == 1,
        reports_tokens_only=params.beam_width is None and params.row_logprobs is None,
    )
    if params.beam_width is not None:
        owner.beams = BeamSearch(request, owner.max_output_tokens)
    for sample in range(params.num_sequences):
        sequence = Sequence(request, sample, list(request.prompt_token_ids), num_prompt)
        if params.prompt_logprobs is not None:
            sequence.prompt_logprobs.append(None)  # nothing comes before the first token
        member = LiveSequence(
            sequence=sequence,
            owner=owner,
            table=JournaledTable(allocator, config.page_size),
            chain=cache.chain((), {"salt": request.cache_salt}),
            key=(rank_of(request, config), request.arrival, sample),
        )
        owner.members.append(member)
    return owner


def _key(live: LiveSequence) -> SequenceKey:
    return live.key


def _remove(queue: list[LiveSequence], live: LiveSequence) -> None:
    at = bisect_left(queue, live.key, key=_key)
    if at == len(queue) or queue[at] is not live:
        raise IntegrityError(f"sequence {live.key} is not in the queue where it must be.")
    del queue[at]
